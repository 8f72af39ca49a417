"""Which figures of a command a measurement gets."""

import os
import tempfile
import unittest

from workshop import Workshop


class Figures(unittest.TestCase):
    def test_what_the_command_reports_wins_over_its_cost(self):
        with tempfile.TemporaryDirectory() as target:
            command = os.path.join(target, "hpp-exec")
            with open(command, "w", encoding="utf-8") as out:
                out.write('#!/bin/sh\necho \'{"seconds": 123}\'\n')
            os.chmod(command, 0o755)
            answer = Workshop(target, 1, 1, True).exec_json("jobs")
        self.assertEqual(answer["seconds"], 123)
        self.assertIn("peak_rss", answer)


if __name__ == "__main__":
    unittest.main()

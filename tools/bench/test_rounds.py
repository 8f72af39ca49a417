"""Medians and spreads of rounds, and when a target counts as held."""

import unittest

import measure
import table
from rounds import HELD, MISSED, OPEN, Rounds, ratios


class Spread(unittest.TestCase):
    def test_few_rounds_spread_from_the_smallest_to_the_largest(self):
        self.assertEqual(Rounds([3, 1, 2, 9, 4]).spread, (1, 9))
        self.assertEqual(Rounds([5]).spread, (5, 5))

    def test_many_rounds_leave_out_as_many_at_either_end_as_the_sign_test_allows(self):
        # 1 - 2 (1 + 8) / 2^8 = 92.97 %; with seven rounds leaving one out would give 87.5 %.
        self.assertEqual(Rounds(range(7)).spread, (0, 6))
        self.assertEqual(Rounds(range(8)).spread, (1, 6))
        # 1 - 2 (1 + 12 + 66) / 2^12 = 96.1 %.
        self.assertEqual(Rounds(range(12)).spread, (2, 9))

    def test_a_target_inside_the_spread_cannot_be_told(self):
        for target, verdict in ((0.9, HELD), (0.95, HELD), (1.0, OPEN), (1.05, OPEN), (1.06, MISSED)):
            self.assertEqual(Rounds([0.95, 1.0, 1.05]).verdict(at_least=target), verdict, target)

    def test_a_limit_from_above_and_one_from_both_sides(self):
        self.assertEqual(Rounds([0.8, 0.9]).verdict(at_most=1.0), HELD)
        self.assertEqual(Rounds([0.8, 1.1]).verdict(at_most=1.0), OPEN)
        self.assertEqual(Rounds([0.9, 1.1]).verdict(0.85, 1.15), HELD)
        self.assertEqual(Rounds([1.1, 1.2]).verdict(0.85, 1.15), OPEN)
        self.assertEqual(Rounds([1.2, 1.3]).verdict(0.85, 1.15), MISSED)


class Ratios(unittest.TestCase):
    def test_a_machine_that_slows_down_changes_no_ratio(self):
        # Twice as fast in each round, which no ratio of medians of unpaired runs would show.
        found = ratios([20, 10, 2], [10, 5, 1])
        self.assertEqual((found.median, found.spread), (2, (2, 2)))

    def test_rounds_that_do_not_pair_are_refused(self):
        with self.assertRaises(ValueError):
            ratios([1, 2], [1])

    def test_a_row_says_median_spread_and_verdict(self):
        line = table.compared("speed", [10, 11, 12], [10, 10, 10], 1.0, "tok/s")
        self.assertEqual((line["ours"], line["theirs"]), ("11 tok/s", "10 tok/s"))
        self.assertEqual((line["result"], line["target"], line["verdict"]), ("1.100x (1.000 to 1.200)", ">= 1.0x", HELD))

    def test_of_times_the_smaller_is_the_better(self):
        line = table.compared("time", [1, 1, 2], [4, 4, 4], 3, "s", smaller_is_better=True)
        self.assertEqual((line["result"], line["verdict"]), ("4.000x (2.000 to 4.000)", OPEN))


class Turns(unittest.TestCase):
    def test_each_round_runs_every_side_and_every_second_one_backwards(self):
        order = []
        measure.in_turns(3, a=lambda: order.append("a"), b=lambda: order.append("b"))
        self.assertEqual("".join(order), "abbaab")


if __name__ == "__main__":
    unittest.main()

"""The values that `gpu_rows.py` reads from plans and profiles."""

import unittest

import gpu_rows
import measure


def profile(*curves):
    link = lambda provider, to_device, pinned: {"kind": "link", "provider": provider, "to_device": to_device, "pinned": pinned}
    return {"machine": {"curves": [{"path": {"kind": "ram_read"}, "points": [{"bytes": 1, "gb_per_s": 99}]}] + [
        {"path": link(*path), "points": [{"bytes": at, "gb_per_s": rate} for at, rate in enumerate(rates, 1)]} for path, rates in curves]}}


class Rows(unittest.TestCase):
    def test_the_bare_link_is_the_fastest_pinned_copy_to_that_device(self):
        curves = [(("cuda", True, False), [9, 30]), (("cuda", True, True), [10, 25, 20]), (("cuda", False, True), [50]),
                  (("webgpu", True, True), [70])]
        self.assertEqual(gpu_rows.bare_link(profile(*curves), "cuda"), (25, True))
        self.assertEqual(gpu_rows.bare_link(profile(*curves[:1]), "cuda"), (30, False))
        with self.assertRaises(measure.Failed):
            gpu_rows.bare_link(profile(*curves[:2]), "webgpu")

    def test_predictions_are_right_within_fifteen_percent_either_way(self):
        verdicts = [gpu_rows.accuracy("", expected, [100, 100, 101], "tok/s")["verdict"] for expected in (84, 86, 114, 115.5, 117)]
        self.assertEqual(verdicts, ["missed", "held", "held", "cannot be told", "missed"])

    def test_resident_partitions_whose_weights_are_inputs_are_not_streamed(self):
        weights = [{"name": "w"}]
        self.assertFalse(gpu_rows.streams({"partitions": [{"weights": weights}, {"weights": [], "residency": "streamed"}]}))
        self.assertTrue(gpu_rows.streams({"partitions": [{}, {"weights": weights, "residency": "streamed"}]}))

    def test_node_names_of_one_layer_are_not_those_of_another(self):
        self.assertNotIn(gpu_rows.node_names("layers.1"), "/model/layers.11/mlp/up_proj/MatMul")
        self.assertEqual(gpu_rows.node_names("head"), "/lm_head/")


if __name__ == "__main__":
    unittest.main()

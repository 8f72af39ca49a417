//! An upper bound on what reading only the rows of active neurons could gain. This bound is why
//! the runtime does not do it.

/// Costs of reads from a disk, with as many reads in flight as the disk can use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadCosts {
    /// Rate of large reads, bytes per millisecond.
    pub bytes_per_ms: f64,
    /// What each read costs in addition, milliseconds.
    pub request_ms: f64,
}

impl ReadCosts {
    /// The time of reading only the rows of active neurons over the time of reading all: 0 to 1. Each neuron is active with probability
    /// `active`, independently of others. A gap of g rows between two active ones costs the shorter of reading over it (`g row / rate`) and
    /// of another request, so with `k = request rate / row`
    ///
    /// `share = active (1 + E min(k, g))`, `P(g) = active (1 - active)^g`.
    pub fn gathered_share(&self, row_bytes: f64, active: f64) -> f64 {
        let (active, off) = (active.clamp(0.0, 1.0), 1.0 - active.clamp(0.0, 1.0));
        let rows_per_request = self.request_ms * self.bytes_per_ms / row_bytes.max(1.0);
        let whole = rows_per_request.floor();
        // active * (sum of off^j for j = 1..whole), and the part of a row that is left.
        let gaps = off * (1.0 - off.powf(whole)) + active * (rows_per_request - whole) * off.powf(whole + 1.0);
        (active + gaps).min(1.0)
    }
}

/// A host's weights that each token reads, and which of them belong to neurons that may be off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NeuronReads {
    /// All weights, bytes.
    pub weights: f64,
    /// The weights of neurons that may be off, bytes.
    pub neurons: f64,
    /// Bytes of one neuron.
    pub row_bytes: f64,
    /// The share of all weights that stays in memory, 0 to 1.
    pub locked_share: f64,
}

impl NeuronReads {
    /// The speedup of a token's reads if only rows of active neurons were read, which takes `share` of the time of reading all rows
    /// ([`ReadCosts::gathered_share`]). It is an upper bound, because it counts neither computing nor memory for the rows. Locked memory
    /// holds first what every token reads.
    pub fn speedup(&self, share: f64) -> f64 {
        let locked = self.locked_share * self.weights;
        let others = self.weights - self.neurons;
        let neurons = self.neurons - (locked - others).max(0.0);
        let after = (others - locked).max(0.0) + neurons * share;
        match self.weights - locked {
            // Infinite if nothing is left to read.
            before if before > 0.0 => before / after.max(0.0),
            _ => 1.0,
        }
    }

    /// The largest share of active neurons with at least this speedup; `None` if it is below 0.1 %.
    pub fn most_active(&self, disk: ReadCosts, speedup: f64) -> Option<f64> {
        let suffices = |active: f64| self.speedup(disk.gathered_share(self.row_bytes, active)) >= speedup;
        let (mut low, mut high) = (1e-3, 1.0);
        if !suffices(low) {
            return None;
        }
        // The speedup falls with the share of active neurons.
        for _ in 0..40 {
            let middle = f64::midpoint(low, high);
            if suffices(middle) {
                low = middle;
            } else {
                high = middle;
            }
        }
        Some(low)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 3.3 GB/s and 6 us, as measured on a virtual machine's disk.
    const DISK: ReadCosts = ReadCosts { bytes_per_ms: 3.3e6, request_ms: 0.006 };
    /// The second matrix of a network of four times the width is a third of a layer.
    const THIRD: NeuronReads = NeuronReads { weights: 12e9, neurons: 4e9, row_bytes: 8192.0, locked_share: 0.25 };

    /// Rows drawn at random, gaps read over where that is shorter than another request.
    #[test]
    fn the_formula_is_the_mean_of_drawn_rows() {
        let mut state = 1u64;
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        for (row_bytes, active) in [(4096.0, 0.05), (4096.0, 0.25), (8192.0, 0.1), (16384.0, 0.17), (65536.0, 0.3)] {
            let rows = 200_000;
            let row_ms = row_bytes / DISK.bytes_per_ms;
            let (mut ms, mut gap) = (0.0, 0u32);
            for _ in 0..rows {
                if draw() < active {
                    ms += row_ms + (f64::from(gap) * row_ms).min(DISK.request_ms);
                    gap = 0;
                } else {
                    gap += 1;
                }
            }
            let drawn = ms / (f64::from(rows) * row_ms);
            let share = DISK.gathered_share(row_bytes, active);
            assert!((share - drawn).abs() < 0.02 * drawn + 0.002, "{row_bytes} {active}: {share} of {drawn}");
        }
    }

    #[test]
    fn small_rows_save_nothing_and_large_ones_what_is_off() {
        assert!(DISK.gathered_share(16.0, 0.1) > 0.99);
        assert!((DISK.gathered_share(1e9, 0.1) - 0.1).abs() < 1e-3);
        assert_eq!((DISK.gathered_share(8192.0, 0.0), DISK.gathered_share(8192.0, 1.0)), (0.0, 1.0));
    }

    #[test]
    fn memory_holds_first_what_every_token_reads() {
        let speedup = |locked_share, share| NeuronReads { locked_share, ..THIRD }.speedup(share);
        // With a quarter of the weights in memory at most 0.75 / (0.75 - 1/3).
        assert!((speedup(0.25, 0.0) - 1.8).abs() < 1e-12);
        assert!((speedup(0.25, 1.0) - 1.0).abs() < 1e-12);
        // Memory holds all but half of the neurons' rows: only those are read.
        assert!((speedup(5.0 / 6.0, 0.2) - 5.0).abs() < 1e-9);
        assert_eq!(speedup(1.0, 0.1), 1.0);
        assert_eq!(speedup(5.0 / 6.0, 0.0), f64::INFINITY);
    }

    #[test]
    fn the_largest_activity_is_where_the_speedup_is_reached() {
        let speedup = |active| THIRD.speedup(DISK.gathered_share(THIRD.row_bytes, active));
        let most = THIRD.most_active(DISK, 1.5).unwrap();
        assert!((0.05..0.12).contains(&most) && (speedup(most) - 1.5).abs() < 1e-6, "{most}");
        assert!(speedup(most + 0.01) < 1.5);
        // No activity gives more than all that can be left out.
        assert_eq!(THIRD.most_active(DISK, 1.9), None);
        assert_eq!(NeuronReads { row_bytes: 16.0, ..THIRD }.most_active(DISK, 1.5), None);
    }
}

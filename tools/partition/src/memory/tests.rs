//! Memory use of placements, computed by hand.

use super::*;
use crate::cost::tests::{dense, problem};
use crate::{Budget, FilledState, GrowingState, Packing, Streamed};

/// Blocks on `gpu0` where the text has a `0`, on the host elsewhere.
fn placed(text: &str) -> Vec<BlockPlacement> {
    let place = |c: char| if c == '0' { Placement::Resident(0) } else { Placement::Cpu };
    text.chars().map(|c| BlockPlacement::both(place(c))).collect()
}

#[test]
fn the_error_has_the_required_budget() {
    let mut problem = problem(dense(2, 1000), Budget { vram: vec![2000], margin: 50, ..Budget::default() });
    let check = |problem: &Problem| fits(problem, &placed(".00."), &[0], Mechanisms::ResidentCpu);
    let error = check(&problem).unwrap_err();
    assert_eq!(error.device, DeviceId::Gpu(0));
    assert_eq!(check_gpu(&problem, &placed(".00."), 0, 0), Err(error.clone()));
    problem.budget.vram[0] = error.required_budget() - 1;
    assert!(check(&problem).is_err());
    problem.budget.vram[0] += 1;
    assert_eq!(check(&problem), Ok(()));
}

/// Each partition is a session with its own constants.
#[test]
fn a_weight_that_two_partitions_read_counts_twice() {
    let mut problem = problem(dense(3, 1000), Budget { vram: vec![1 << 20], ..Budget::default() });
    problem.blocks[1..4].iter_mut().for_each(|block| block.weights.push((9, 50)));
    let weights = |problem: &Problem, text: &str| usage(problem, &placed(text), &[0]).gpus[0].weights;
    assert_eq!(weights(&problem, ".000."), 3050);
    assert_eq!(weights(&problem, ".0.0."), 2100);
    problem.cuts = vec![2];
    assert_eq!(weights(&problem, ".000."), 3100);
    (problem.cuts, problem.budget.kv) = (vec![], KvHome::Host);
    assert_eq!(weights(&problem, ".000."), 3150);
}

#[test]
fn with_state_on_the_host_the_gpu_holds_the_state_of_two_blocks() {
    let kv = |kv: KvHome, text: &str| {
        let budget = Budget { vram: vec![1 << 20], kv, ..Budget::default() };
        let usage = usage(&problem(dense(4, 1000), budget), &placed(text), &[0]);
        (usage.gpus[0].kv, usage.host.kv)
    };
    assert_eq!(kv(KvHome::Device, ".000.."), (750, 250));
    assert_eq!(kv(KvHome::Host, ".000.."), (2 * 250, 1000));
    // With only one block there is no next state to copy ahead.
    assert_eq!(kv(KvHome::Host, ".0...."), (250, 1000));
}

/// A block that computes on the host in one phase has its own state buffer on the GPU for the other, if the state is updated in place.
#[test]
fn blocks_that_change_devices_have_their_own_state_buffer() {
    let budget = Budget { vram: vec![1 << 20], kv: KvHome::Host, ..Budget::default() };
    let mut problem = problem(dense(4, 1000), budget);
    let mut placements = placed(".0000.");
    placements[1..3].iter_mut().for_each(|placement| placement.decode = Placement::Cpu);
    assert_eq!(usage(&problem, &placements, &[0]).gpus[0].kv, 2 * 250 + 2 * 250);
    problem.blocks[1].kv_grows = Some(GrowingState { fixed: 0, token: 1 });
    assert_eq!(usage(&problem, &placements, &[0]).gpus[0].kv, 2 * 250 + 250);
}

/// Constants that streamed blocks share are on the GPU once, and not in slots.
#[test]
fn slots_hold_copied_weights_but_no_constants() {
    let mut problem = problem(dense(3, 1000), Budget { vram: vec![1 << 20], ..Budget::default() });
    for (number, pieces) in [(1, [800, 100]), (2, [500, 400]), (3, [800, 100])] {
        problem.blocks[number].streamed = Streamed::new(pieces.to_vec(), Some((number as u32 / 3, 100)));
    }
    let on_gpu = |text: &str| {
        let place = |c: char| if c == 's' { Placement::Streamed(0) } else { Placement::Cpu };
        let placements: Vec<BlockPlacement> = text.chars().map(|c| BlockPlacement::both(place(c))).collect();
        let usage = usage(&problem, &placements, &[3]);
        (usage.gpus[0].weights, usage.gpus[0].ring)
    };
    assert_eq!(on_gpu(".s..."), (100, 3 * 900));
    assert_eq!(on_gpu(".s.s."), (200, 3 * 900));
    // Different blocks share a slot: each of its pieces has the size of the largest one.
    assert_eq!(on_gpu(".ss.."), (100, 3 * (800 + 400)));
}

#[test]
fn host_memory_is_a_budget_too() {
    let problem = problem(dense(2, 1000), Budget { ram: Some(3000), ..Budget::default() });
    let error = fits(&problem, &placed("...."), &[], Mechanisms::ResidentCpu).unwrap_err();
    assert_eq!((error.device, error.demand.weights), (DeviceId::Cpu, 6000));
}

/// All weights of a small model need less memory than one block and the read-ahead buffers.
#[test]
fn the_required_budget_may_be_that_of_all_weights() {
    let mut problem = problem(dense(2, 1000), Budget { ram: Some(100), read_ahead: 50_000, ..Budget::default() });
    problem.disk_bytes_per_ms = Some(1.0);
    let check = |problem: &Problem| fits(problem, &placed("...."), &[], Mechanisms::ResidentCpuDisk);
    let error = check(&problem).unwrap_err();
    assert_eq!(error.demand.weights, 6000);
    problem.budget.ram = Some(error.required_budget());
    assert_eq!(check(&problem), Ok(()));
    problem.budget.ram = Some(error.required_budget() - 1);
    assert_eq!(check(&problem), Err(OverBudget { budget: error.required_budget() - 1, ..error }));
}

/// Each partition has its own constants, and with weights read from disk each block is a partition.
#[test]
fn each_partition_of_the_host_holds_its_shared_weights() {
    let mut problem = problem(dense(3, 1000), Budget::default());
    problem.blocks[1..4].iter_mut().for_each(|block| block.weights.push((9, 50)));
    let placements = placed(".....");
    let host_weights = |problem: &Problem| usage_of_partitions(problem, &placements, &[]).host.weights;
    assert_eq!((usage(&problem, &placements, &[]).host.weights, host_weights(&problem)), (7050, 7050));
    problem.cuts = vec![2];
    assert_eq!((usage(&problem, &placements, &[]).host.weights, host_weights(&problem)), (7050, 7100));
    let reads = |usage: MemoryUsage| usage.host_reads[Phase::Decode as usize].all();
    assert_eq!(reads(usage(&problem, &placements, &[])) + 100, reads(usage_of_partitions(&problem, &placements, &[])));
}

/// Blocks of 1000 bytes, packed 1200, and a head of twice that.
fn blocks_on_disk(ram: u64, packing: Packing) -> Problem {
    let mut problem = problem(dense(4, 1000), Budget { ram: Some(ram), packing, ..Budget::default() });
    problem.disk_bytes_per_ms = Some(1.0);
    for block in &mut problem.blocks {
        (block.kv_bytes, block.workspace_bytes) = (0, 0);
    }
    problem.blocks.remove(0);
    problem
}

/// Of 1200 packed bytes of a block 399.6 are decompressed from 199.8 on disk.
const COMPRESSED: Packing = Packing { growth_permille: 200, decompressed_permille: 333, read_permille: 500 };

/// The most bytes read of one block, and the bytes read from disk per decode pass. Places by letter: `s` streamed to the GPU, `0` resident on it, others
/// on the host.
fn level_and_read(problem: &Problem, text: &str) -> (u64, u64) {
    let place = |c: char| match c {
        's' => Placement::Streamed(0),
        '0' => Placement::Resident(0),
        _ => Placement::Cpu,
    };
    let placements: Vec<BlockPlacement> = text.chars().map(|c| BlockPlacement::both(place(c))).collect();
    let mut problem = problem.clone();
    problem.budget.vram = vec![1 << 20];
    let usage = usage(&problem, &placements, &[3]);
    (usage.read_level(&problem, Phase::Decode), usage.disk_read_bytes(&problem, Phase::Decode))
}

/// 4 layers and a head: 6000 bytes, 7200 packed. Of a layer 399.6 bytes are decompressed, of the head 799.2, from half as many on disk.
#[test]
fn uncompressed_bytes_are_locked_first() {
    let found = |ram, packing| level_and_read(&blocks_on_disk(ram, packing), ".....");
    // Half of each layer and 1800 bytes of the head are locked, and the other 600 of one block are in memory. A pass loads 3000 bytes, among them
    // all decompressed bytes of the layers and 600 of the head, of which 1099.2 are not read.
    assert_eq!(found(4800, COMPRESSED), (600, 3000 - 1099));
    // The head alone: of it half is locked, so that no more is read of it than of a layer.
    assert_eq!(found(2400, COMPRESSED), (1200, 6000 - 1198));
    // Nothing is locked: a pass reads all compressed and uncompressed bytes.
    assert_eq!(found(2399, COMPRESSED), (2400, 7200 - 1198));
    // A pass loads 300 bytes of each block, all of them decompressed from half as many.
    assert_eq!(found(6000, COMPRESSED), (300, 750));
    // Exactly the uncompressed bytes of the layers are locked.
    let even = Packing { decompressed_permille: 250, ..COMPRESSED };
    assert_eq!(found(6000, even), (300, 750));
    // A byte of each block.
    assert_eq!(found(7199, COMPRESSED), (1, 3));
    assert_eq!(found(7200, COMPRESSED), (0, 0));
}

#[test]
fn without_compression_a_pass_reads_all_unlocked_bytes() {
    let packed = Packing { growth_permille: 200, ..Packing::default() };
    assert_eq!(level_and_read(&blocks_on_disk(4800, packed), "....."), (600, 3000));
    assert_eq!(level_and_read(&blocks_on_disk(4000, Packing::default()), "....."), (500, 2500));
}

/// If not everything is locked, at least one byte is read, even if the compressed file has no bytes.
#[test]
fn no_bytes_are_read_only_if_all_are_locked() {
    let all_derived = Packing { growth_permille: 200, decompressed_permille: 1000, read_permille: 0 };
    assert_eq!(level_and_read(&blocks_on_disk(4800, all_derived), "....."), (600, 1));
}

/// Weights that are copied to a GPU are read uncompressed; weights that are resident there are not read.
#[test]
fn weights_for_gpus_are_not_compressed() {
    // Two layers are copied; of the other two and the head 2 * 399.6 and 600 bytes are decompressed.
    assert_eq!(level_and_read(&blocks_on_disk(4800, COMPRESSED), "ss..."), (600, 3000 - 699));
    assert_eq!(level_and_read(&blocks_on_disk(6000, COMPRESSED), "ss..."), (300, 600 + 450));
    assert_eq!(level_and_read(&blocks_on_disk(4800, COMPRESSED), "sssss"), (600, 3000));
    // One layer is resident on the GPU: of the other three and the head 720 bytes each are loaded.
    assert_eq!(level_and_read(&blocks_on_disk(3840, COMPRESSED), "0...."), (720, 2880 - 959));
}

#[test]
fn state_on_disk_takes_a_window_for_one_sequence_and_time_to_read() {
    let budget = Budget { host_kv_on_disk: true, ..Budget::default() };
    let mut problem = problem(dense(4, 1000), budget);
    problem.disk_bytes_per_ms = Some(10.0);
    let found = |problem: &Problem| usage(problem, &placed("......"), &[]);
    assert_eq!(found(&problem).host.kv, 3 * 250);
    problem.blocks[1].kv_bytes = 600;
    assert_eq!(found(&problem).host.kv, 3 * 600);
    let many = problem.with_sequences(5, false);
    assert_eq!(found(&many).host.kv, 3 * 600, "sequences run one after another");
    let reads = |problem: &Problem| found(problem).states_on_disk[Phase::Decode as usize].read_bytes;
    assert_eq!((reads(&problem), reads(&many)), (600 + 3 * 250, 5 * (600 + 3 * 250)));
    let evictions = |problem: &Problem, phase: Phase| found(problem).states_on_disk[phase as usize].evictions;
    let decode = Phase::Decode;
    assert_eq!((evictions(&problem, decode), evictions(&many, decode)), (4, 20), "of each layer and sequence");
    let mut short = problem.clone();
    (short.load.prompt_tokens, short.load.new_tokens) = (100, 0);
    short
        .blocks
        .iter_mut()
        .for_each(|block| block.kv_filled = Some(FilledState { fixed: 0, token: 1, capacity: 1000 }));
    assert_eq!(reads(&short), 0, "the window holds 100 bytes of each layer");
    assert_eq!(evictions(&short, decode), 0);
    short.load.prompt_tokens = 500;
    // Laid out for 512 tokens, of which three layers hold 250.
    assert_eq!(reads(&short), 512 + 3 * 250 - (3 * 600 - 3 * 512), "what fits beside three of the largest");
    // 998 of 1262 bytes of four layers do not fit.
    assert_eq!(evictions(&short, decode), 4, "four times the share of what does not fit, rounded up");
    // A prompt of one pass reads nothing, and writes what does not stay.
    short.load.passes = vec![500];
    let prompt = found(&short).states_on_disk[Phase::Prefill as usize];
    assert_eq!((prompt.read_bytes, prompt.evictions), (0, 4));
    short.load.passes = vec![100];
    assert_eq!(evictions(&short, Phase::Prefill), 0);
    problem.budget.host_kv_on_disk = false;
    assert_eq!((found(&problem).host.kv, reads(&problem)), (600 + 3 * 250, 0));
}

/// The largest of the widened weights is in memory twice when a session packs it. States and activations come later.
#[test]
fn the_largest_widened_weight_is_in_memory_twice_while_a_session_is_created() {
    let problem = |ram| {
        let mut problem = problem(dense(4, 1000), Budget { ram: Some(ram), ..Budget::default() });
        problem.disk_bytes_per_ms = Some(10.0);
        problem.blocks.iter_mut().for_each(|block| block.session_bytes = 10);
        (problem.blocks[2].widened_bytes, problem.blocks[4].widened_bytes) = (1500, 1900);
        problem
    };
    let usage_with = |ram| usage(&problem(ram), &placed("......"), &[]);
    let MemoryUsage { host, largest_widened, host_sessions, .. } = usage_with(0);
    assert_eq!((largest_widened, host_sessions), (1900, 60));
    let later = host.kv + host.workspace - host_sessions;
    assert!(0 < later && later < largest_widened);
    // What sessions hold from their creation on is in memory while others are created.
    let enough = host.weights + largest_widened + host_sessions;
    for (ram, holds_all) in [(enough, true), (enough - 1, false), (host.weights + later, false)] {
        assert_eq!(usage_with(ram).host_holds_all(&problem(ram)), holds_all, "{ram}");
        let fits = |mechanisms| fits(&problem(ram), &placed("......"), &[], mechanisms).is_ok();
        assert_eq!(fits(Mechanisms::ResidentCpu), holds_all, "{ram}");
        assert!(fits(Mechanisms::ResidentCpuDisk), "one block at a time is created for reading from disk");
    }
    assert_eq!(usage(&problem(0), &placed("0000.."), &[]).host_sessions, 20);
    assert_eq!(usage(&problem(0), &placed("...00."), &[]).largest_widened, 1500);
}

/// A head that multiplies with a transposed table: the table is in memory twice while its session is created, and later once.
#[test]
fn what_is_folded_takes_memory_while_a_session_is_created() {
    let problem = |ram, disk: bool| {
        let mut problem = problem(dense(4, 1000), Budget { ram: Some(ram), ..Budget::default() });
        problem.disk_bytes_per_ms = disk.then_some(10.0);
        (problem.blocks[5].workspace_bytes, problem.blocks[5].folded_bytes) = (4100, 4000);
        problem
    };
    let usage_with = |ram| usage(&problem(ram, false), &placed("......"), &[]);
    let Demand { weights, kv, workspace, .. } = usage_with(0).host;
    assert_eq!((weights, kv, workspace), (8000, 1000, 100));
    // All weights and the folded table, which is in memory a second time until it is packed. Passes need 1100 bytes of that
    // memory later, for states and activations.
    let needed = |disk: bool| {
        let fits = |ram: u64| fits(&problem(ram, disk), &placed("......"), &[], Mechanisms::All).is_ok();
        (0..20_000).find(|ram| fits(*ram)).unwrap()
    };
    assert_eq!(needed(false), 8000 + 2000 + 2000);
    assert_eq!(needed(true), 2000 + 2000, "of the largest block, one at a time");
    // With less, the embedding's table of 2000 bytes stays on disk. With still less, all weights are locked, but they come from
    // prepared files, which hold the folded table too.
    let found = |ram: u64| {
        let (problem, usage) = (problem(ram, true), usage(&problem(ram, true), &placed("......"), &[]));
        let level = usage.read_level(&problem, Phase::Decode);
        (level, usage.host_holds_all(&problem), usage.host_holds_all_but_tables(&problem))
    };
    assert_eq!(
        [12_000, 11_999, 10_000, 9_999].map(found),
        [(0, true, true), (0, false, true), (0, false, true), (0, false, false)]
    );
    // A GPU may have the weights as inputs, and computes it in each pass.
    assert_eq!(usage_with(0).gpus.len(), 0);
    let mut on_gpu = problem(0, false);
    on_gpu.budget.vram = vec![1 << 20];
    assert_eq!(usage(&on_gpu, &placed(".....0"), &[0]).gpus[0].workspace, 4100);
}

/// Each layer has 250 bytes of state. gpu0 computes the first, the prompts of the second and the tokens of the third; gpu1 computes the rest of the
/// second and third.
#[test]
fn a_gpu_holds_what_it_decodes_and_a_buffer_for_each_layer_that_it_computes_in_prompts_only() {
    let kv = |home: KvHome, sequences: u64| {
        let budget = Budget { vram: vec![1 << 20, 1 << 20], kv: home, ..Budget::default() };
        let problem = problem(dense(4, 1000), budget).with_sequences(sequences, false);
        let mut placements = placed("......");
        placements[1] = BlockPlacement::both(Placement::Resident(0));
        placements[2] = BlockPlacement { prefill: Placement::Resident(0), decode: Placement::Resident(1) };
        placements[3] = BlockPlacement { prefill: Placement::Resident(1), decode: Placement::Resident(0) };
        usage(&problem, &placements, &[0, 0]).gpus.iter().map(|gpu| gpu.kv).collect::<Vec<_>>()
    };
    assert_eq!(kv(KvHome::Device, 1), [2 * 250 + 250, 250 + 250]);
    // Three sequences: the kept states three times, each buffer once.
    assert_eq!(kv(KvHome::Device, 3), [3 * 2 * 250 + 250, 3 * 250 + 250]);
    // All states are on the host: two shared buffers on gpu0, which computes two of the layers in each phase, and one on gpu1.
    assert_eq!(kv(KvHome::Host, 1), [2 * 250, 250]);
    assert_eq!(kv(KvHome::Host, 3), [2 * 250, 250]);
}

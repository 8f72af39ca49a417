//! Matrices: windows, slabs and orientation change nothing, and every number is the rounded one.

use super::block_quantizer::{Bits, BlockFormat, BlockScale, ScaleRule, ScaleType, dequantize};
use super::contents::{Jobs, Part, PartContents};
use super::matrix::{Job, Matrix, NotFiniteError, Place, Window};
use super::moments::{WeightMoments, tests::moments};
use crate::virtual_file::{Computed, VirtualFile};
use half::{bf16, f16};
use hpp_schema::DType;
use proptest::prelude::*;
use std::io::Read;
use std::sync::Arc;

fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::Float32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::Float16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
    }
}

/// A value as this type holds it.
fn held(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::Float32 => value,
        DType::Float16 => f16::from_f32(value).to_f32(),
        _ => bf16::from_f32(value).to_f32(),
    }
}

/// A job over `[depth, columns]` values, stored so or transposed.
fn job(values: &[f32], columns: usize, dtype: DType, transposed: bool, format: BlockFormat) -> Job {
    let depth = values.len() / columns;
    let stored: Vec<f32> = match transposed {
        false => values.to_vec(),
        true => (0..columns).flat_map(|column| (0..depth).map(move |row| values[row * columns + column])).collect(),
    };
    let place = Place::Memory(encode(dtype, &stored).into());
    let scales = if dtype == DType::Float16 { ScaleType::Float16 } else { ScaleType::Float32 };
    Job { matrix: Matrix { name: "w".into(), dtype, place, depth, columns, transposed }, format, scales, moments: None }
}

/// The number at a position, restored from a window of all columns, and the scale of its block.
fn restored(job: &Job, window: &Window, row: usize, column: usize) -> (f32, f32) {
    let block = column * job.blocks() + row / job.format.block_size;
    let nibble = |bytes: &[u8], index: usize| bytes[index / 2] >> (4 * (index % 2)) & 15;
    let at = block * job.format.block_size + row % job.format.block_size;
    let width = job.scales.bytes();
    let scale = &window.scales[block * width..][..width];
    let scale = match job.scales {
        ScaleType::Float32 => f32::from_le_bytes(scale.try_into().unwrap()),
        ScaleType::Float16 => f16::from_le_bytes(scale.try_into().unwrap()).to_f32(),
    };
    let zero_points = &window.zero_points[column * job.zero_point_bytes()..];
    let (level, zero_point) = match (job.format.bits, job.format.asymmetric) {
        (Bits::Four, false) => (nibble(&window.numbers, at), 8),
        (Bits::Eight, false) => (window.numbers[at], 128),
        (Bits::Four, true) => (nibble(&window.numbers, at), nibble(zero_points, row / job.format.block_size)),
        (Bits::Eight, true) => (window.numbers[at], zero_points[row / job.format.block_size]),
    };
    (dequantize(level, BlockScale { scale, zero_point }), scale.abs())
}

fn formats() -> impl Strategy<Value = BlockFormat> {
    (prop_oneof![Just(16usize), Just(32)], any::<bool>(), any::<bool>()).prop_map(|(block, asymmetric, eight)| {
        BlockFormat {
            bits: if eight { Bits::Eight } else { Bits::Four },
            block_size: block,
            asymmetric,
            scale: ScaleRule::Extremes,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn every_number_is_near_the_stored_one_in_any_orientation_type_and_window(
        values in proptest::collection::vec(-4.0..4.0f32, 67 * 11),
        format in formats(),
        dtype in prop_oneof![Just(DType::Float32), Just(DType::Float16), Just(DType::Bfloat16)],
        transposed: bool,
        window_bytes in 1usize..800,
    ) {
        let columns = 11;
        let job = job(&values, columns, dtype, transposed, format);
        let window = job.window(0..columns).unwrap();
        for (index, value) in values.iter().enumerate() {
            let (number, step) = restored(&job, &window, index / columns, index % columns);
            prop_assert!((number - held(dtype, *value)).abs() <= step * 1.01, "{} for {}", number, value);
        }
        // Read in small windows and pieces, and in any order of weights, it is the same.
        let jobs = Arc::new(Jobs::with_window(vec![job.clone(), job], window_bytes));
        let parts =
            [(Part::Numbers, &window.numbers), (Part::Scales, &window.scales), (Part::ZeroPoints, &window.zero_points)];
        for (job, (part, expected)) in [0, 1, 0].into_iter().flat_map(|job| parts.map(|part| (job, part))) {
            let length = jobs.bytes(job, part);
            prop_assert_eq!(length, expected.len() as u64);
            let mut file = VirtualFile::default();
            file.put_computed(7, Arc::new(PartContents { jobs: jobs.clone(), job, part }), length);
            let mut read = vec![];
            file.reader().read_to_end(&mut read).unwrap();
            prop_assert_eq!(&read[7..], &expected[..]);
        }
    }
}

/// Matrices stored row by row are quantized by rows, transposed ones by columns. The last block has an odd number of rows, two columns have
/// only zeros of either sign, and one has numbers too small for the inverse of a scale.
#[test]
fn orientation_does_not_change_the_bytes() {
    let columns = 150;
    let number = |at: usize| match at % columns {
        column @ (7 | 8) if at / columns % 3 == column - 7 => -0.0,
        7 | 8 => 0.0,
        9 => 1e-40,
        _ => ((at * 7919) % 1013) as f32 / 500.0 - 1.0,
    };
    let values: Vec<f32> = (0..199 * columns).map(number).collect();
    for (bits, asymmetric, scale) in [Bits::Four, Bits::Eight].into_iter().flat_map(|bits| {
        let rules = [
            (false, ScaleRule::Extremes),
            (true, ScaleRule::Extremes),
            (true, ScaleRule::Fitted),
            (false, ScaleRule::Fitted),
        ];
        rules.map(|(asymmetric, scale)| (bits, asymmetric, scale))
    }) {
        let format = BlockFormat { bits, block_size: 32, asymmetric, scale };
        for dtype in [DType::Float32, DType::Float16, DType::Bfloat16] {
            let window = |transposed| job(&values, columns, dtype, transposed, format).window(0..columns).unwrap();
            assert_eq!(window(false), window(true), "{format:?} {dtype}");
        }
    }
}

#[test]
fn the_bytes_do_not_depend_on_the_number_of_threads() {
    let values: Vec<f32> = (0..96 * 700).map(|i| ((i * 7919) % 1013) as f32 / 500.0 - 1.0).collect();
    let job = job(
        &values,
        700,
        DType::Float32,
        false,
        BlockFormat { bits: Bits::Four, block_size: 32, asymmetric: false, scale: ScaleRule::Extremes },
    );
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| job.window(0..700).unwrap())
    };
    assert_eq!(with(1), with(5));
}

#[test]
fn a_matrix_is_read_from_a_file_at_its_offset_in_panels_of_columns() {
    let values: Vec<f32> = (0..64 * 10).map(|i| (i % 37) as f32 - 18.0).collect();
    let format = BlockFormat { bits: Bits::Eight, block_size: 16, asymmetric: false, scale: ScaleRule::Extremes };
    let in_memory = job(&values, 10, DType::Float32, false, format);
    let whole = in_memory.window(0..10).unwrap();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file, &[vec![1; 100], encode(DType::Float32, &values)].concat()).unwrap();
    let place = Place::File(file.path().to_owned(), 100);
    let in_file = Job { matrix: Matrix { place, ..in_memory.matrix.clone() }, ..in_memory };
    let panels = [0..4, 4..7, 7..10].map(|columns| in_file.window(columns).unwrap());
    assert_eq!(panels.iter().flat_map(|panel| panel.numbers.clone()).collect::<Vec<_>>(), whole.numbers);
    assert_eq!(panels.iter().flat_map(|panel| panel.scales.clone()).collect::<Vec<_>>(), whole.scales);
    file.as_file().set_len(2000).unwrap();
    assert!(in_file.window(0..10).is_err(), "the file is too short");
}

#[test]
fn the_first_number_that_is_not_finite_is_named() {
    for (transposed, row, column, offset) in [(false, 33, 70, (33 * 90 + 70) * 2), (true, 70, 33, (70 * 64 + 33) * 2)] {
        let mut values = vec![1.0; 64 * 90];
        values[33 * 90 + 70] = f32::NAN;
        values[63 * 90 + 89] = f32::INFINITY;
        let format = BlockFormat { bits: Bits::Four, block_size: 32, asymmetric: false, scale: ScaleRule::Extremes };
        let job = job(&values, 90, DType::Bfloat16, transposed, format);
        let error = job.window(0..90).unwrap_err();
        let error = error.get_ref().unwrap().downcast_ref::<NotFiniteError>().unwrap();
        let offset = offset as u64;
        assert_eq!(error, &NotFiniteError { name: "w".into(), row, column, offset });
        let contents = PartContents { jobs: Arc::new(Jobs::new(vec![job])), job: 0, part: Part::Scales };
        assert!(contents.read_at(0, &mut [0; 8]).is_err());
    }
}

/// Spans of inputs reach over slabs and windows: neither changes a byte, nor do orientation and threads.
#[test]
fn compensated_bytes_do_not_depend_on_windows_and_orientation() {
    let (depth, columns) = (150, 70);
    let number = |at: usize| ((at * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
    let values: Vec<f32> = (0..depth * columns).map(number).collect();
    let input = |at: usize| 1.0 + f64::from(number(at));
    let observed = moments(depth, 64, |i, j| input(i) * input(j) + if i == j { 0.5 } else { 0.0 });
    for asymmetric in [false, true] {
        let format = BlockFormat { bits: Bits::Four, block_size: 32, asymmetric, scale: ScaleRule::Extremes };
        let job = |transposed| Job {
            moments: WeightMoments::of(&observed, "w"),
            ..job(&values, columns, DType::Float32, transposed, format)
        };
        let whole = job(false).window(0..columns).unwrap();
        assert_eq!(job(true).window(0..columns).unwrap(), whole);
        let part = job(true).window(66..columns).unwrap();
        let bytes = 66 * job(true).number_bytes();
        assert_eq!(
            (part.numbers[..].as_ref(), &part.scales[..]),
            (&whole.numbers[bytes..], &whole.scales[66 * job(true).scale_bytes()..])
        );
        let plain = Job { moments: None, ..job(false) }.window(0..columns).unwrap();
        assert_ne!(plain.numbers, whole.numbers);
        let bad =
            Job { matrix: Matrix { place: with_a_nan(&values, 140 * columns + 3), ..job(false).matrix }, ..job(false) };
        let error = bad.window(0..columns).unwrap_err().to_string();
        assert!(error.contains("row 140, column 3"), "{error}");
    }
}

fn with_a_nan(values: &[f32], at: usize) -> Place {
    let mut values = values.to_vec();
    values[at] = f32::NAN;
    Place::Memory(encode(DType::Float32, &values).into())
}

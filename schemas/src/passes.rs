//! Divides prompts into passes. The planner and the runtime must divide them in the same way.

/// How many of the `left` tokens of a prompt the next pass computes, at most `chunk`. The last pass has at least two tokens, unless `chunk` is less
/// than three, because a pass of a single token would count as decoding. A prompt is divided in the same way whether it runs alone or with others.
/// So its logits are the same; products with more or fewer rows may round differently.
pub fn chunk_length(left: u64, chunk: u64) -> u64 {
    match chunk {
        3.. if left.checked_sub(1) == Some(chunk) => chunk - 1,
        _ => left.min(chunk),
    }
}

/// The tokens of each pass of a prompt; a `chunk` of 0 counts as 1.
pub fn prompt_passes(prompt: u64, chunk: u64) -> Vec<u64> {
    let chunk = chunk.max(1);
    let mut left = prompt;
    let next = || {
        let tokens = chunk_length(left, chunk);
        left -= tokens;
        (tokens > 0).then_some(tokens)
    };
    std::iter::from_fn(next).collect()
}

#[cfg(test)]
mod tests {
    use super::prompt_passes;

    #[test]
    fn chunks_are_whole_and_the_last_is_no_single_token() {
        assert_eq!(prompt_passes(8, 3), [3, 3, 2]);
        assert_eq!(prompt_passes(7, 3), [3, 2, 2]);
        assert_eq!(prompt_passes(192, 96), [96, 96]);
        assert_eq!(prompt_passes(193, 96), [96, 95, 2]);
        assert_eq!(prompt_passes(1, 96), [1]);
        assert_eq!(prompt_passes(5, u64::MAX), [5]);
        assert_eq!((prompt_passes(3, 2), prompt_passes(2, 0)), (vec![2, 1], vec![1, 1]));
        // Steps of several chunks are divided like their chunks.
        for (left, chunk, step) in (1..400).flat_map(|left| [(left, 32, 64), (left, 96, 96), (left, 5, 65)]) {
            let steps: Vec<u64> =
                prompt_passes(left, step).into_iter().flat_map(|length| prompt_passes(length, chunk)).collect();
            assert_eq!(steps, prompt_passes(left, chunk), "{left} by {step}");
        }
    }
}

//! Which bytes of a strided tensor travel, and under which strides they arrive.
//!
//! Pure arithmetic on sizes and strides in elements, as PyTorch has them (never negative). The rules:
//!
//! | the tensor's memory | what travels | [`Travel`] |
//! |---|---|---|
//! | has no gap: contiguous, permuted (channels last too), expanded, sliding window | that run of bytes, strides kept | [`Travel::Whole`] |
//! | has gaps of at most [`MAX_GAP_BYTES`] | that run with zeroed gaps, strides kept | [`Travel::Padded`] |
//! | has larger gaps, or small ones that cannot be told from overlaps | a packed copy | [`Travel::Packed`] |
//!
//! So no byte that the tensor does not show leaves the process, the receiver holds at most what is
//! visible and 4 KiB, and a small non-contiguous view stays non-contiguous.

/// Gaps up to this size are sent as zeros, so that the receiver keeps the strides. A page: about
/// what a message costs anyway, and enough for every small view.
pub(crate) const MAX_GAP_BYTES: u64 = 4096;

/// How the bytes of a tensor are to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Travel {
    /// Every byte from the first element to the end of the farthest, all of which are visible.
    Whole,
    /// The same run, but bytes between the elements are replaced by zeros.
    Padded,
    /// A copy without gaps, with [`packed_strides`].
    Packed,
}

/// Sizes and strides in elements, and the bytes of one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dims<'a> {
    pub(crate) sizes: &'a [u64],
    pub(crate) strides: &'a [u64],
    pub(crate) item: usize,
}

/// What sizes and strides say about a tensor's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Bytes from the first element to the end of the farthest; 0 for an empty tensor.
    pub(crate) span: u64,
    /// How to send it.
    pub(crate) travel: Travel,
    /// Whether the strides are exactly the row-major ones, so that they need not be sent.
    pub(crate) row_major: bool,
}

impl Layout {
    /// The layout of a tensor.
    pub(crate) fn of(Dims { sizes, strides, item }: Dims<'_>) -> Self {
        let item = item as u64;
        let row_major = is_row_major(sizes, strides);
        let count = elements(sizes);
        if count == 0 || row_major {
            return Self { span: count * item, travel: Travel::Whole, row_major };
        }
        let cover = Cover::of(sizes, strides);
        let travel = match cover.gap() {
            Some(0) => Travel::Whole,
            Some(gap) if gap.saturating_mul(item) <= MAX_GAP_BYTES => Travel::Padded,
            _ => Travel::Packed,
        };
        Self { span: cover.reach * item, travel, row_major }
    }
}

/// How completely the elements of a tensor cover the run that they span.
struct Cover {
    /// Elements from the first to one past the farthest.
    reach: u64,
    /// Number of distinct elements, if no two indices can meet.
    distinct: Option<u64>,
    /// Whether every position of the run is an element.
    full: bool,
}

impl Cover {
    /// Adds the dimensions by growing stride. While each steps no farther than what the ones
    /// before it reach, the run has no gap; while each steps at least so far, no two elements meet.
    fn of(sizes: &[u64], strides: &[u64]) -> Self {
        let mut dims: Vec<(u64, u64)> = stepping(sizes, strides).map(|d| (d.stride, d.size)).collect();
        dims.sort_unstable();
        let mut cover = Self { reach: 1, distinct: Some(1), full: true };
        for (stride, size) in dims {
            cover.full &= stride <= cover.reach;
            cover.distinct = cover.distinct.filter(|_| stride >= cover.reach).map(|n| n * size);
            cover.reach += (size - 1) * stride;
        }
        cover
    }

    /// Positions that are no element; `None` if that cannot be told cheaply.
    fn gap(&self) -> Option<u64> {
        if self.full { Some(0) } else { self.distinct.map(|distinct| self.reach - distinct) }
    }
}

struct Dim {
    size: u64,
    stride: u64,
}

/// The dimensions along which different indices are different places.
fn stepping(sizes: &[u64], strides: &[u64]) -> impl Iterator<Item = Dim> {
    let dims = sizes.iter().zip(strides).map(|(&size, &stride)| Dim { size, stride });
    dims.filter(|dim| dim.size > 1 && dim.stride > 0)
}

fn elements(sizes: &[u64]) -> u64 {
    sizes.iter().product()
}

fn is_row_major(sizes: &[u64], strides: &[u64]) -> bool {
    let mut expected = 1;
    sizes.iter().zip(strides).rev().all(|(&size, &stride)| {
        let fits = stride == expected;
        expected *= size.max(1);
        fits
    })
}

/// The strides of a contiguous tensor.
pub(crate) fn row_major_strides(sizes: &[u64]) -> Vec<u64> {
    packed_strides(sizes, &vec![1; sizes.len()])
}

/// The strides of a copy without gaps: row-major, except that an expanded dimension (stride 0)
/// stays expanded, so that the copy is not larger than what it shows.
pub(crate) fn packed_strides(sizes: &[u64], strides: &[u64]) -> Vec<u64> {
    let mut next = 1;
    let mut packed = vec![0; sizes.len()];
    for (index, (&size, &stride)) in sizes.iter().zip(strides).enumerate().rev() {
        if size <= 1 || stride > 0 {
            packed[index] = next;
            next *= size.max(1);
        }
    }
    packed
}

/// Elements in a copy without gaps.
pub(crate) fn packed_elements(sizes: &[u64], strides: &[u64]) -> u64 {
    if elements(sizes) == 0 { 0 } else { stepping(sizes, strides).map(|dim| dim.size).product() }
}

/// A run of bytes to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    /// Offset in the tensor's memory, from its first element.
    pub(crate) from: usize,
    /// Offset in the copy.
    pub(crate) to: usize,
    /// Length in bytes.
    pub(crate) len: usize,
}

/// Calls `visit` with blocks that together are all elements of a tensor, once each unless they
/// overlap, as few blocks as the strides allow.
pub(crate) fn for_each_block(dims: Dims<'_>, copy_strides: &[u64], mut visit: impl FnMut(Block)) {
    let item = dims.item;
    if elements(dims.sizes) == 0 {
        return;
    }
    let loops = loops(dims.sizes, dims.strides, copy_strides);
    let (len, loops) = match loops.split_last() {
        Some((inner, outer)) if inner.from == 1 && inner.to == 1 => (inner.size * item, outer),
        _ => (item, loops.as_slice()),
    };
    let mut index = vec![0; loops.len()];
    let mut block = Block { from: 0, to: 0, len };
    loop {
        visit(block);
        let Some(position) = step(&mut index, loops) else {
            return;
        };
        block.from = position.0 * item;
        block.to = position.1 * item;
    }
}

/// Number of blocks that [`for_each_block`] visits.
pub(crate) fn count_blocks(dims: Dims<'_>) -> u64 {
    let loops = loops(dims.sizes, dims.strides, dims.strides);
    let count: usize = loops.iter().map(|l| l.size).product();
    match loops.last() {
        Some(inner) if inner.from == 1 => (count / inner.size) as u64,
        _ => count as u64,
    }
}

/// One loop of a copy; steps in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Loop {
    size: usize,
    from: usize,
    to: usize,
}

/// Nested loops over all elements, the smallest step innermost, neighbours merged where one
/// continues the other. Expanded dimensions are the same element again and need no loop.
fn loops(sizes: &[u64], strides: &[u64], copy_strides: &[u64]) -> Vec<Loop> {
    let as_loop = |((&size, &from), &to): ((&u64, &u64), &u64)| {
        let fit = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Loop { size: fit(size), from: fit(from), to: fit(to) }
    };
    let mut all: Vec<Loop> = sizes.iter().zip(strides).zip(copy_strides).map(as_loop).collect();
    all.retain(|l| l.size > 1 && l.from > 0);
    all.sort_by_key(|l| std::cmp::Reverse(l.from));
    let mut merged: Vec<Loop> = Vec::with_capacity(all.len());
    for inner in all {
        match merged.last_mut() {
            Some(outer) if outer.from == inner.from * inner.size && outer.to == inner.to * inner.size => {
                *outer = Loop { size: outer.size * inner.size, ..inner };
            }
            _ => merged.push(inner),
        }
    }
    merged
}

/// Advances `index` like an odometer and returns its place in both memories; `None` at the end.
fn step(index: &mut [usize], loops: &[Loop]) -> Option<(usize, usize)> {
    let wheel = index.iter().zip(loops).rposition(|(&i, l)| i + 1 < l.size)?;
    index[wheel] += 1;
    index[wheel + 1..].fill(0);
    let places = index.iter().zip(loops).map(|(&i, l)| (i * l.from, i * l.to));
    Some(places.fold((0, 0), |sum, place| (sum.0 + place.0, sum.1 + place.1)))
}

/// Sorts runs `(start, end)` and joins those that touch.
pub(crate) fn merge_runs(mut runs: Vec<(usize, usize)>) -> Vec<(usize, usize)> {
    runs.sort_unstable();
    let mut merged: Vec<(usize, usize)> = Vec::new();
    for (start, end) in runs {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element's place, by brute force.
    fn places(sizes: &[u64], strides: &[u64]) -> Vec<u64> {
        let mut all = vec![0];
        for (&size, &stride) in sizes.iter().zip(strides) {
            all = all.iter().flat_map(|&at| (0..size).map(move |i| at + i * stride)).collect();
        }
        all
    }

    fn dims_of<'a>(sizes: &'a [u64], strides: &'a [u64], item: usize) -> Dims<'a> {
        Dims { sizes, strides, item }
    }

    /// The layout of a tensor with items of four bytes.
    fn of(sizes: &[u64], strides: &[u64]) -> Layout {
        Layout::of(dims_of(sizes, strides, 4))
    }

    fn travel(sizes: &[u64], strides: &[u64]) -> Travel {
        of(sizes, strides).travel
    }

    #[test]
    fn contiguous_tensors_travel_whole_without_strides() {
        for (sizes, strides) in [(&[2, 3][..], &[3, 1][..]), (&[], &[]), (&[5], &[1]), (&[1, 1], &[1, 1])] {
            let layout = of(sizes, strides);

            assert_eq!(layout.travel, Travel::Whole);
            assert!(layout.row_major);
            assert_eq!(layout.span, 4 * sizes.iter().product::<u64>());
        }
    }

    #[test]
    fn permuted_and_channels_last_tensors_travel_whole_with_their_strides() {
        let transposed = of(&[3, 2], &[1, 3]);
        let channels_last = of(&[2, 3, 4, 5], &[60, 1, 15, 3]);

        assert_eq!(transposed, Layout { span: 24, travel: Travel::Whole, row_major: false });
        assert_eq!(channels_last, Layout { span: 480, travel: Travel::Whole, row_major: false });
    }

    #[test]
    fn an_expanded_dimension_costs_nothing() {
        let layout = of(&[1000, 3], &[0, 1]);

        assert_eq!(layout, Layout { span: 12, travel: Travel::Whole, row_major: false });
    }

    #[test]
    fn an_odd_stride_of_a_dimension_of_one_is_kept_and_spans_nothing() {
        let layout = of(&[1, 5], &[100, 1]);

        assert_eq!(layout, Layout { span: 20, travel: Travel::Whole, row_major: false });
    }

    #[test]
    fn an_empty_tensor_spans_nothing_whatever_its_strides() {
        for strides in [[3, 1], [7, 9], [0, 0]] {
            let layout = of(&[0, 3], &strides);
            assert_eq!((layout.span, layout.travel), (0, Travel::Whole));
            assert_eq!(layout.row_major, strides == [3, 1]);
        }
        assert_eq!(packed_elements(&[0, 3], &[7, 9]), 0);
        for_each_block(dims_of(&[0, 3], &[7, 9], 4), &[3, 1], |_| panic!("nothing to copy"));
    }

    #[test]
    fn a_sliding_window_travels_as_the_run_it_slides_over() {
        let layout = of(&[98, 3], &[1, 1]);

        assert_eq!(layout, Layout { span: 400, travel: Travel::Whole, row_major: false });
    }

    #[test]
    fn small_gaps_are_padded_and_large_ones_packed_away() {
        assert_eq!(travel(&[2, 2], &[4, 1]), Travel::Padded);
        // 1024 gaps of one element each are 4096 bytes, one more is too much.
        assert_eq!(travel(&[1025], &[2]), Travel::Padded);
        assert_eq!(travel(&[1026], &[2]), Travel::Packed);
        assert_eq!(travel(&[1000, 500], &[1000, 1]), Travel::Packed);
    }

    #[test]
    fn overlaps_with_gaps_are_packed() {
        // Elements 0, 2, 4 and 3, 5, 7: some meet in other sizes, and 1 and 6 are gaps.
        assert_eq!(travel(&[2, 3], &[3, 2]), Travel::Packed);
    }

    #[test]
    fn packed_strides_keep_expanded_dimensions_expanded() {
        assert_eq!(packed_strides(&[4, 3, 2], &[100, 0, 7]), [2, 0, 1]);
        assert_eq!(packed_elements(&[4, 3, 2], &[100, 0, 7]), 8);
        assert_eq!(packed_strides(&[4, 1, 2], &[100, 0, 7]), [2, 2, 1]);
        assert_eq!(row_major_strides(&[4, 0, 2]), [2, 2, 1]);
    }

    #[test]
    fn blocks_are_all_elements_once_and_in_the_right_place() {
        let cases: [(&[u64], &[u64]); 7] = [
            (&[3, 4], &[10, 1]),
            (&[3, 4], &[1, 10]),
            (&[2, 3, 4], &[40, 10, 2]),
            (&[2, 3, 4], &[1, 2, 6]),
            (&[], &[]),
            (&[5, 1, 2], &[0, 9, 3]),
            (&[2, 2, 2, 2], &[100, 4, 50, 1]),
        ];
        for (sizes, strides) in cases {
            let to = packed_strides(sizes, strides);
            let mut expected: Vec<_> = places(sizes, strides).into_iter().zip(places(sizes, &to)).collect();
            expected.sort_unstable();
            expected.dedup();
            let mut found = Vec::new();
            let mut blocks = 0;
            for_each_block(dims_of(sizes, strides, 2), &to, |block| {
                blocks += 1;
                let elements = 0..(block.len / 2) as u64;
                found.extend(elements.map(|i| ((block.from / 2) as u64 + i, (block.to / 2) as u64 + i)));
            });
            found.sort_unstable();

            assert_eq!(found, expected, "{sizes:?} {strides:?}");
            assert!(blocks >= count_blocks(dims_of(sizes, strides, 2)));
        }
    }

    #[test]
    fn rows_are_copied_as_one_block_each_and_touching_rows_as_one() {
        let mut blocks = Vec::new();
        for_each_block(dims_of(&[2, 3, 4], &[100, 4, 1], 1), &[12, 4, 1], |block| {
            blocks.push(block);
        });

        assert_eq!(blocks, [Block { from: 0, to: 0, len: 12 }, Block { from: 100, to: 12, len: 12 }]);
        assert_eq!(count_blocks(dims_of(&[2, 3, 4], &[100, 4, 1], 1)), 2);
    }

    #[test]
    fn the_decision_agrees_with_brute_force() {
        let dims: Vec<(u64, u64)> =
            (1..4).flat_map(|size| (0..7).map(move |stride| (size, stride))).collect();
        for &a in &dims {
            for &b in &dims {
                for &c in &dims {
                    let (sizes, strides) = ([a.0, b.0, c.0], [a.1, b.1, c.1]);
                    let layout = Layout::of(dims_of(&sizes, &strides, 1));
                    let mut places = places(&sizes, &strides);
                    places.sort_unstable();
                    places.dedup();
                    let gaps = layout.span - places.len() as u64;

                    assert_eq!(layout.span, places.last().unwrap() + 1);
                    match layout.travel {
                        Travel::Whole => assert_eq!(gaps, 0, "{sizes:?} {strides:?}"),
                        Travel::Padded => assert!(gaps > 0),
                        Travel::Packed => assert!(packed_elements(&sizes, &strides) <= elements(&sizes)),
                    }
                }
            }
        }
    }

    #[test]
    fn runs_that_touch_or_overlap_become_one() {
        assert_eq!(merge_runs(vec![(8, 9), (0, 4), (4, 6), (1, 3)]), [(0, 6), (8, 9)]);
    }
}

//! [`TensorWriter`]: the tensors of one message to send.
//!
//! A tensor that occurs twice is sent once. Tensors that share memory are sent in one buffer that
//! covers what any of them shows, so that they share again at the receiver; where that would show
//! more than the gaps of [`layout`] allow, or needs too long a look, they travel apart.

use std::collections::HashMap;

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use tensorcall::engine::buffer::{Buffer, OutOfMemory, Region};
use tensorcall_proto::wire::tensor::{Device, TensorDesc};

use super::layout::{self, Block, Dims, Layout, MAX_GAP_BYTES, Travel};
use super::memory::{Memory, region_of};
use super::torch::{Plain, TorchApi, Unfit};
use crate::gil::outside;

/// Memory up to this size is copied when the message is made, so that the program may change small
/// tensors at once; larger memory is read from its place while it is sent. The copy costs 3 us at
/// most, less than one wake-up of the thread that sends.
pub(crate) const COPIED_BYTES: usize = 64 << 10;

/// So many tensors are compared one by one, more are looked up.
const FEW: usize = 16;

/// Copies from here on are made without the interpreter lock.
const LONG_COPY_BYTES: usize = 1 << 20;

/// Shared memory with gaps is looked at run by run, but no more than this many runs.
const MAX_RUNS: u64 = 1 << 16;

/// No item is larger, so that a run which starts at a multiple of it suits every dtype.
const MAX_ITEM: usize = 16;

/// Collects the tensors of one message.
pub(crate) struct TensorWriter<'py> {
    py: Python<'py>,
    api: &'py TorchApi,
    entries: Vec<Entry<'py>>,
    /// Address of a tensor object (kept alive by its entry) to its index, once there are many.
    index_of: HashMap<usize, u32>,
}

struct Entry<'py> {
    tensor: Bound<'py, PyAny>,
    plain: Plain,
    layout: Layout,
}

/// Where a tensor has come to lie.
struct Placed {
    /// Index of the tensor.
    member: usize,
    buffer: u32,
    offset: usize,
    strides: Option<Vec<u64>>,
}

impl<'py> TensorWriter<'py> {
    /// An empty writer. Imports torch if nobody did.
    pub(crate) fn new(py: Python<'py>) -> PyResult<Self> {
        Ok(Self::with(py, TorchApi::get(py)?))
    }

    /// A writer that reads tensors by `api`.
    pub(crate) fn with(py: Python<'py>, api: &'py TorchApi) -> Self {
        Self { py, api, entries: Vec::new(), index_of: HashMap::new() }
    }

    /// Whether `object` is of the exact type `torch.Tensor`, which need not be plain.
    pub(crate) fn is_exact_tensor(&self, object: &Bound<'py, PyAny>) -> bool {
        self.api.is_exact_tensor(object)
    }

    /// The plain tensor that a parameter of a module is, with the same place in the graph; `None` for others.
    pub(crate) fn tensor_of_parameter(
        &self,
        object: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.api.tensor_of_parameter(object)
    }

    /// Adds a tensor and returns its index, the same one for the same object.
    ///
    /// # Errors
    ///
    /// `TypeError` for another type, `RuntimeError` for a tensor that is not plain strided memory on
    /// the CPU.
    pub(crate) fn push(&mut self, tensor: &Bound<'py, PyAny>) -> PyResult<u32> {
        Ok(self.try_push(tensor)??)
    }

    /// Adds a tensor, or says why it cannot travel as memory.
    pub(crate) fn try_push(&mut self, tensor: &Bound<'py, PyAny>) -> PyResult<Result<u32, Unfit>> {
        match self.index_of(tensor) {
            Some(index) => Ok(Ok(index)),
            None => self.append(tensor),
        }
    }

    /// Adds a tensor under an index of its own, though it be there already; it shares its memory then.
    pub(crate) fn push_again(&mut self, tensor: &Bound<'py, PyAny>) -> PyResult<u32> {
        Ok(self.append(tensor)??)
    }

    /// Whether no tensor was added.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The tensors that need gradients, in their order.
    pub(crate) fn recorded(&self) -> Vec<Bound<'py, PyAny>> {
        let recorded = self.entries.iter().filter(|entry| entry.plain.requires_grad);
        recorded.map(|entry| entry.tensor.clone()).collect()
    }

    fn append(&mut self, tensor: &Bound<'py, PyAny>) -> PyResult<Result<u32, Unfit>> {
        let plain = match self.api.read(tensor)? {
            Ok(plain) => plain,
            Err(unfit) => return Ok(Err(unfit)),
        };
        let layout = Layout::of(plain.dims());
        let index = u32::try_from(self.entries.len())?;
        self.entries.push(Entry { tensor: tensor.clone(), plain, layout });
        self.remember();
        Ok(Ok(index))
    }

    fn index_of(&self, tensor: &Bound<'py, PyAny>) -> Option<u32> {
        if self.entries.len() > FEW {
            return self.index_of.get(&(tensor.as_ptr() as usize)).copied();
        }
        let index = self.entries.iter().position(|entry| entry.tensor.is(tensor))?;
        u32::try_from(index).ok()
    }

    /// Enters the last tensor, or all of them when they have just become many, in the table.
    fn remember(&mut self) {
        let count = self.entries.len();
        let known = if count == FEW + 1 { 0 } else { count - 1 };
        if count > FEW {
            let new = self.entries.iter().zip(0..).skip(known);
            self.index_of.extend(new.map(|(entry, index)| (entry.tensor.as_ptr() as usize, index)));
        }
    }

    /// The tensors' descriptions and the memory they lie in. The regions keep large tensors' storages
    /// alive.
    pub(crate) fn finish(self) -> PyResult<(Vec<TensorDesc>, Vec<Region>)> {
        let mut packing =
            Packing { py: self.py, entries: &self.entries, placed: Vec::new(), buffers: Vec::new() };
        packing.all((0..self.entries.len()).collect())?;
        let Packing { mut placed, buffers, .. } = packing;
        placed.sort_unstable_by_key(|placed| placed.member);
        let descs = self.entries.into_iter().zip(placed).map(|(entry, placed)| entry.describe(placed));
        Ok((descs.collect(), buffers))
    }
}

impl Entry<'_> {
    fn describe(self, placed: Placed) -> TensorDesc {
        TensorDesc {
            dtype: self.plain.dtype,
            shape: self.plain.sizes,
            strides: placed.strides,
            buffer: placed.buffer,
            offset: placed.offset as u64,
            device: Device::CPU,
            requires_grad: self.plain.requires_grad,
            conj: self.plain.conj,
            neg: self.plain.neg,
        }
    }

    fn dims(&self) -> Dims<'_> {
        self.plain.dims()
    }

    fn start(&self) -> usize {
        self.plain.start
    }

    fn span(&self) -> usize {
        usize::try_from(self.layout.span).unwrap_or(usize::MAX)
    }

    fn run(&self) -> Run {
        Run { start: self.start(), end: self.start().saturating_add(self.span()) }
    }

    fn kept_strides(&self) -> Option<Vec<u64>> {
        (!self.layout.row_major).then(|| self.plain.strides.clone())
    }
}

/// Addresses `start..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    start: usize,
    end: usize,
}

impl Run {
    fn len(self) -> usize {
        self.end - self.start
    }

    fn holds(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }
}

/// Finds a place for every entry.
struct Packing<'a, 'py> {
    py: Python<'py>,
    entries: &'a [Entry<'py>],
    /// In the order of finding.
    placed: Vec<Placed>,
    buffers: Vec<Region>,
}

impl<'a, 'py> Packing<'a, 'py> {
    /// Places each of `members` once.
    fn all(&mut self, members: Vec<usize>) -> PyResult<()> {
        if let [one] = members.as_slice() {
            return self.alone(*one);
        }
        for group in self.overlapping(members) {
            self.group(group)?;
        }
        Ok(())
    }

    fn group(&mut self, group: Vec<usize>) -> PyResult<()> {
        match group.as_slice() {
            [one] => self.alone(*one),
            _ => self.together(group),
        }
    }

    /// Groups of entries whose runs overlap, directly or by way of others.
    fn overlapping(&self, mut members: Vec<usize>) -> Vec<Vec<usize>> {
        members.sort_by_key(|&member| self.entries[member].start());
        let mut groups: Vec<Vec<usize>> = Vec::new();
        let mut end = 0;
        for member in members {
            let run = self.entries[member].run();
            match groups.last_mut() {
                Some(group) if run.start < end && run.len() > 0 => group.push(member),
                _ => groups.push(vec![member]),
            }
            end = end.max(run.end);
        }
        groups
    }

    fn alone(&mut self, member: usize) -> PyResult<()> {
        let entry = &self.entries[member];
        let (run, dims) = (entry.run(), entry.dims());
        match entry.layout.travel {
            Travel::Whole => {
                let region = self.whole(&[member], run)?;
                self.place(member, region, entry.kept_strides())
            }
            Travel::Padded => {
                let region = self.copy(&[member], run, run.len(), |source, target| {
                    layout::for_each_block(dims, dims.strides, |block| copy_block(source, block, target));
                })?;
                self.place(member, region, entry.kept_strides())
            }
            Travel::Packed => {
                let packed = layout::packed_strides(dims.sizes, dims.strides);
                let elements = usize::try_from(layout::packed_elements(dims.sizes, dims.strides))?;
                let region = self.copy(&[member], run, elements * dims.item, |source, target| {
                    layout::for_each_block(dims, &packed, |block| copy_block(source, block, target));
                })?;
                let row_major = packed == layout::row_major_strides(dims.sizes);
                self.place(member, region, (!row_major).then_some(packed))
            }
        }
    }

    /// Places entries that overlap in one buffer, if what they show together has few gaps.
    fn together(&mut self, group: Vec<usize>) -> PyResult<()> {
        let run = self.union(&group);
        let Some(lead) = self.lead(&group, run) else {
            return group.into_iter().try_for_each(|member| self.alone(member));
        };
        let Some(shown) = self.shown(&group) else {
            return self.apart(group);
        };
        let gaps = run.len() - shown.iter().map(|&(start, end)| end - start).sum::<usize>();
        if gaps + lead > usize::try_from(MAX_GAP_BYTES)? {
            return self.apart(group);
        }
        let region = if gaps + lead == 0 {
            self.whole(&group, run)?
        } else {
            self.copy(&group, run, lead + run.len(), |source, target| {
                for &(start, end) in &shown {
                    let (from, len) = (start - run.start, end - start);
                    copy_block(source, Block { from, to: lead + from, len }, target);
                }
            })?
        };
        let buffer = self.add(region)?;
        for member in group {
            let entry = &self.entries[member];
            let offset = lead + (entry.start() - run.start);
            self.placed.push(Placed { member, buffer, offset, strides: entry.kept_strides() });
        }
        Ok(())
    }

    /// Entries without gaps share as before, and those with gaps that lie inside them too; the other
    /// ones go alone.
    fn apart(&mut self, group: Vec<usize>) -> PyResult<()> {
        let is_whole = |&member: &usize| self.entries[member].layout.travel == Travel::Whole;
        let (whole, gapped): (Vec<_>, Vec<_>) = group.into_iter().partition(is_whole);
        let mut groups = self.overlapping(whole);
        for member in gapped {
            let run = self.entries[member].run();
            let home = groups.iter().position(|group| self.union(group).holds(run));
            match home {
                Some(home) => groups[home].push(member),
                None => groups.push(vec![member]),
            }
        }
        groups.into_iter().try_for_each(|group| self.group(group))
    }

    fn union(&self, group: &[usize]) -> Run {
        let runs = group.iter().map(|&member| self.entries[member].run());
        let union = |a: Run, b: Run| Run { start: a.start.min(b.start), end: a.end.max(b.end) };
        runs.reduce(union).unwrap_or(Run { start: 0, end: 0 })
    }

    /// Bytes to put before the run, so that every entry starts at a multiple of its item size; `None`
    /// if there is no such number.
    fn lead(&self, group: &[usize], run: Run) -> Option<usize> {
        let fits = |lead: &usize| {
            let entries = group.iter().map(|&member| &self.entries[member]);
            entries.clone().all(|e| (lead + e.start() - run.start).is_multiple_of(e.dims().item))
        };
        [0, run.start % MAX_ITEM].into_iter().find(fits)
    }

    /// The addresses that any of the group shows; `None` if there are too many runs to look at.
    fn shown(&self, group: &[usize]) -> Option<Vec<(usize, usize)>> {
        let entries = || group.iter().map(|&member| &self.entries[member]);
        let whole = entries().filter(|entry| entry.layout.travel == Travel::Whole);
        let mut runs = layout::merge_runs(whole.map(|entry| (entry.run().start, entry.run().end)).collect());
        let inside = |runs: &[(usize, usize)], run: Run| {
            runs.iter().any(|&(start, end)| Run { start, end }.holds(run))
        };
        let gapped: Vec<_> = entries().filter(|entry| !inside(&runs, entry.run())).collect();
        let blocks = |entry: &&Entry<'_>| layout::count_blocks(entry.dims());
        if gapped.iter().map(blocks).fold(0, u64::saturating_add) > MAX_RUNS {
            return None;
        }
        for entry in gapped {
            layout::for_each_block(entry.dims(), entry.dims().strides, |block| {
                let start = entry.start() + block.from;
                runs.push((start, start + block.len));
            });
        }
        Some(layout::merge_runs(runs))
    }

    /// A run as it is: copied if small, else named.
    fn whole(&self, members: &[usize], run: Run) -> PyResult<Region> {
        if run.len() > COPIED_BYTES {
            return region_of(self.tensors(members), run.start, run.len());
        }
        let mut bytes = vec![0; run.len()];
        Memory::of(self.entries, run.start, run.len()).copy(0, &mut bytes);
        Ok(Region::from_vec(bytes))
    }

    /// A buffer of `len` zeroed bytes that `fill` copies parts of a run into.
    fn copy(
        &self,
        members: &[usize],
        run: Run,
        len: usize,
        fill: impl Fn(&Memory<'_>, &mut [u8]) + Sync,
    ) -> PyResult<Region> {
        let out_of_memory = |error: OutOfMemory| PyMemoryError::new_err(error.to_string());
        let mut target = Buffer::zeroed(len).map_err(out_of_memory)?;
        if len < LONG_COPY_BYTES {
            fill(&Memory::of(self.entries, run.start, run.len()), target.as_mut());
        } else {
            let source = region_of(self.tensors(members), run.start, run.len())?;
            outside(self.py, || fill(&Memory::of_region(&source), target.as_mut()));
        }
        Ok(Region::from_buffer(target))
    }

    fn tensors(&self, members: &[usize]) -> impl Iterator<Item = &'a Bound<'py, PyAny>> {
        members.iter().map(|&member| &self.entries[member].tensor)
    }

    fn place(&mut self, member: usize, region: Region, strides: Option<Vec<u64>>) -> PyResult<()> {
        let buffer = self.add(region)?;
        self.placed.push(Placed { member, buffer, offset: 0, strides });
        Ok(())
    }

    fn add(&mut self, region: Region) -> PyResult<u32> {
        let index = u32::try_from(self.buffers.len())?;
        self.buffers.push(region);
        Ok(index)
    }
}

fn copy_block(source: &Memory<'_>, block: Block, target: &mut [u8]) {
    source.copy(block.from, &mut target[block.to..block.to + block.len]);
}

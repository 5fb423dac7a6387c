//! The fields of a message as they come in: each byte is looked at once, and kept memory follows what came.

use std::mem;

use super::{StoreLimits, StoreWireError, TEXT_COST};

/// One field of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Byte,
    Short,
    Long,
    Key,
    Value,
    /// A count and so many keys.
    Keys,
    /// A count and so many keys with values.
    Pairs,
    /// Values whose number is known.
    Values,
}

/// The fields of a message that is coming in.
#[derive(Debug)]
pub(super) struct Fields {
    plan: &'static [Part],
    pub(super) numbers: Vec<u64>,
    pub(super) texts: Vec<Vec<u8>>,
    /// Texts of the current list that have not come, once its count is known.
    left: Option<u64>,
    /// The bytes of a number that have come.
    digits: [u8; 8],
    have: usize,
    /// The text that is coming in, and how long it will be.
    text: Option<(Vec<u8>, usize)>,
    /// What is announced so far, as [`StoreLimits::max_message`] counts.
    cost: usize,
    /// What of that has come, and is kept.
    kept: usize,
}

impl Fields {
    pub(super) fn new(plan: &'static [Part], left: Option<u64>) -> Self {
        Self {
            plan,
            numbers: Vec::new(),
            texts: Vec::new(),
            left,
            digits: [0; 8],
            have: 0,
            text: None,
            cost: 0,
            kept: 0,
        }
    }

    /// The memory that the fields take, about.
    pub(super) fn kept(&self) -> usize {
        self.kept
    }

    /// What comes next, after all of the plan has.
    pub(super) fn then(&mut self, plan: &'static [Part]) {
        self.plan = plan;
    }

    /// Takes in as much as is there; tells whether all fields have come.
    pub(super) fn read(&mut self, input: &mut &[u8], limits: &StoreLimits) -> Result<bool, StoreWireError> {
        while let Some((&part, rest)) = self.plan.split_first() {
            let is_whole = match part {
                Part::Byte => self.read_number(input, 1),
                Part::Short => self.read_number(input, 4),
                Part::Long => self.read_number(input, 8),
                Part::Key => self.read_text(input, limits.max_key, limits)?,
                Part::Value => self.read_text(input, limits.max_value, limits)?,
                Part::Keys | Part::Pairs | Part::Values => self.read_list(part, input, limits)?,
            };
            if !is_whole {
                return Ok(false);
            }
            self.plan = rest;
        }
        Ok(true)
    }

    fn read_number(&mut self, input: &mut &[u8], width: usize) -> bool {
        let number = self.number(input, width);
        self.numbers.extend(number);
        number.is_some()
    }

    fn read_list(
        &mut self,
        part: Part,
        input: &mut &[u8],
        limits: &StoreLimits,
    ) -> Result<bool, StoreWireError> {
        if self.left.is_none() {
            let Some(count) = self.number(input, 8) else { return Ok(false) };
            if count > limits.max_keys {
                return Err(StoreWireError::TooManyKeys { count, limit: limits.max_keys });
            }
            self.left = Some(if part == Part::Pairs { 2 * count } else { count });
        }
        while let Some(left) = self.left.filter(|left| *left > 0) {
            let is_value = part == Part::Values || (part == Part::Pairs && left % 2 == 1);
            let limit = if is_value { limits.max_value } else { limits.max_key };
            if !self.read_text(input, limit, limits)? {
                return Ok(false);
            }
            self.left = Some(left - 1);
        }
        self.left = None;
        Ok(true)
    }

    fn read_text(
        &mut self,
        input: &mut &[u8],
        limit: usize,
        limits: &StoreLimits,
    ) -> Result<bool, StoreWireError> {
        let (mut bytes, len) = if let Some(text) = self.text.take() {
            text
        } else {
            let Some(len) = self.number(input, 8) else { return Ok(false) };
            let known = usize::try_from(len).ok().filter(|len| *len <= limit);
            let known = known.ok_or(StoreWireError::TextTooLong { len, limit })?;
            self.cost += known + TEXT_COST;
            if self.cost > limits.max_message {
                return Err(StoreWireError::MessageTooLarge { limit: limits.max_message });
            }
            self.kept += TEXT_COST;
            (Vec::with_capacity(known.min(input.len())), known)
        };
        let (taken, rest) = input.split_at((len - bytes.len()).min(input.len()));
        bytes.extend_from_slice(taken);
        self.kept += taken.len();
        *input = rest;
        if bytes.len() < len {
            self.text = Some((bytes, len));
            return Ok(false);
        }
        self.texts.push(bytes);
        Ok(true)
    }

    fn number(&mut self, input: &mut &[u8], width: usize) -> Option<u64> {
        let (taken, rest) = input.split_at((width - self.have).min(input.len()));
        self.digits[self.have..self.have + taken.len()].copy_from_slice(taken);
        self.have += taken.len();
        *input = rest;
        if self.have < width {
            return None;
        }
        self.have = 0;
        Some(u64::from_le_bytes(mem::take(&mut self.digits)))
    }
}

//! Handshake messages as bytes: framing, transcript and proofs.
//!
//! Both ends keep an [`Envelope`]. It cuts the stream into messages, never buffering more than one, and
//! hashes every byte that either side says; a proof is an HMAC of that hash, so it covers the whole
//! conversation up to itself.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::error::HandshakeError;
use crate::wire::VERSION;

/// The largest handshake message, header included, and so the most that is buffered for a stranger.
pub const MAX_MESSAGE: usize = 4096;

/// Random bytes that make each handshake unlike any other.
pub type Nonce = [u8; 32];

/// The kinds of handshake messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The initiator's job and nonce.
    Hello = 1,
    /// The responder's nonce.
    Challenge = 2,
    /// Who the initiator is and whom it wants, with its proof.
    Auth = 3,
    /// Who the responder is, with its proof.
    Welcome = 4,
    /// The responder's refusal.
    Reject = 5,
}

/// What a proof is for; keeps one side's proof from passing as the other's.
#[derive(Debug, Clone, Copy)]
pub(super) enum Proof {
    Initiator,
    Responder,
    Refusal,
}

/// One end's view of the byte stream.
pub(super) struct Envelope {
    key: Hmac<Sha256>,
    transcript: Sha256,
    /// The message that is coming in: never more than [`MAX_MESSAGE`].
    inbox: Vec<u8>,
    /// Messages to be sent.
    outbox: Vec<u8>,
    /// What came after the last message.
    pub(super) leftover: Vec<u8>,
}

/// A whole message that came in.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) kind: Kind,
    /// Header, body and proof.
    bytes: Vec<u8>,
}

impl Envelope {
    pub(super) fn new(secret: &[u8]) -> Self {
        Self {
            key: keyed(secret),
            transcript: Sha256::new(),
            inbox: Vec::new(),
            outbox: Vec::new(),
            leftover: Vec::new(),
        }
    }

    /// Takes from `bytes` what the next message needs, and returns it when it is whole.
    pub(super) fn read(
        &mut self,
        bytes: &mut &[u8],
        expected: &[Kind],
    ) -> Result<Option<Received>, HandshakeError> {
        self.fill(bytes, HEADER_LEN);
        let Some((kind, len)) = check_header(&self.inbox, bytes, expected)? else {
            return Ok(None);
        };
        self.fill(bytes, len);
        if self.inbox.len() < len {
            return Ok(None);
        }
        Ok(Some(Received { kind, bytes: std::mem::take(&mut self.inbox) }))
    }

    /// How much of the next message has come.
    pub(super) fn received(&self) -> usize {
        self.inbox.len()
    }

    pub(super) fn poll_send(&mut self) -> Option<Vec<u8>> {
        (!self.outbox.is_empty()).then(|| std::mem::take(&mut self.outbox))
    }

    /// Sends a message without a proof.
    pub(super) fn send(&mut self, kind: Kind, body: &impl Serialize) -> Result<(), HandshakeError> {
        let message = encode(kind, body, 0)?;
        self.transcript.update(&message);
        self.outbox.extend_from_slice(&message);
        Ok(())
    }

    /// Sends a message and proves with it that this end knows the secret and has heard all of the above.
    pub(super) fn send_proved(
        &mut self,
        kind: Kind,
        body: &impl Serialize,
        proof: Proof,
    ) -> Result<(), HandshakeError> {
        let mut message = encode(kind, body, PROOF_LEN)?;
        self.transcript.update(&message);
        let mac = self.prove(proof);
        self.transcript.update(mac);
        message.extend_from_slice(&mac);
        self.outbox.extend_from_slice(&message);
        Ok(())
    }

    /// Sends a refusal outside the transcript, to somebody who proved nothing.
    pub(super) fn send_bare(&mut self, kind: Kind, body: &impl Serialize) -> Result<(), HandshakeError> {
        let mut message = encode(kind, body, PROOF_LEN)?;
        message.extend_from_slice(&[0; PROOF_LEN]);
        self.outbox.extend_from_slice(&message);
        Ok(())
    }

    /// Reads a message that carries no proof.
    pub(super) fn open<T: DeserializeOwned>(&mut self, message: &Received) -> Result<T, HandshakeError> {
        self.transcript.update(&message.bytes);
        decode(message.kind, &message.bytes[HEADER_LEN..])
    }

    /// Reads a message that ends in a proof, and says whether the proof holds.
    pub(super) fn open_proved(&mut self, message: &Received, proof: Proof) -> Result<Opened, HandshakeError> {
        let Some((said, mac)) = message.bytes.split_last_chunk::<PROOF_LEN>() else {
            return Err(HandshakeError::Malformed(message.kind));
        };
        let Some(body) = said.get(HEADER_LEN..) else {
            return Err(HandshakeError::Malformed(message.kind));
        };
        self.transcript.update(said);
        let is_proved = bool::from(self.prove(proof).ct_eq(mac));
        self.transcript.update(mac);
        Ok(Opened { kind: message.kind, body: body.to_vec(), is_proved })
    }

    fn prove(&self, proof: Proof) -> [u8; PROOF_LEN] {
        let mut mac = self.key.clone();
        mac.update(proof.tag());
        mac.update(&self.transcript.clone().finalize());
        mac.finalize().into_bytes().into()
    }

    fn fill(&mut self, bytes: &mut &[u8], len: usize) {
        let wanted = len.saturating_sub(self.inbox.len()).min(bytes.len());
        let (taken, rest) = bytes.split_at(wanted);
        self.inbox.extend_from_slice(taken);
        *bytes = rest;
    }
}

/// A message that came with a proof.
pub(super) struct Opened {
    kind: Kind,
    body: Vec<u8>,
    pub(super) is_proved: bool,
}

impl Opened {
    /// The nonce at the start of the body, which says what the proof answers.
    pub(super) fn answers(&self) -> Option<&Nonce> {
        self.body.first_chunk()
    }

    pub(super) fn body<T: DeserializeOwned>(&self) -> Result<T, HandshakeError> {
        decode(self.kind, &self.body)
    }
}

impl Proof {
    fn tag(self) -> &'static [u8] {
        match self {
            Self::Initiator => b"tensorcall handshake: initiator\0",
            Self::Responder => b"tensorcall handshake: responder\0",
            Self::Refusal => b"tensorcall handshake: refusal\0",
        }
    }
}

impl Kind {
    fn from_wire(kind: u8) -> Option<Self> {
        [Self::Hello, Self::Challenge, Self::Auth, Self::Welcome, Self::Reject]
            .into_iter()
            .find(|&known| known as u8 == kind)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hello => "a hello",
            Self::Challenge => "a challenge",
            Self::Auth => "a proof",
            Self::Welcome => "a welcome",
            Self::Reject => "a refusal",
        })
    }
}

/// Checks as much of the header as is there; `more` are the bytes behind it, for the error's text.
fn check_header(
    inbox: &[u8],
    more: &[u8],
    expected: &[Kind],
) -> Result<Option<(Kind, usize)>, HandshakeError> {
    let known = inbox.len().min(MAGIC.len());
    if inbox[..known] != MAGIC[..known] {
        let found = inbox.iter().chain(more).copied().take(SHOWN_BYTES).collect();
        return Err(HandshakeError::NotAHandshake { found });
    }
    if let Some(&theirs) = inbox.get(4)
        && theirs != VERSION
    {
        return Err(HandshakeError::Version { theirs });
    }
    if let Some(&kind) = inbox.get(5) {
        let found = Kind::from_wire(kind).ok_or(HandshakeError::UnknownKind(kind))?;
        if !expected.contains(&found) {
            return Err(HandshakeError::OutOfTurn { expected: expected[0], found });
        }
    }
    let &[.., kind, low, high] = inbox.get(..HEADER_LEN).unwrap_or_default() else {
        return Ok(None);
    };
    let len = HEADER_LEN + usize::from(u16::from_le_bytes([low, high]));
    if len > MAX_MESSAGE {
        return Err(HandshakeError::TooLarge { len, limit: MAX_MESSAGE });
    }
    Ok(Kind::from_wire(kind).map(|kind| (kind, len)))
}

/// Header and body, with room announced for a proof of `proof_len` bytes.
fn encode(kind: Kind, body: &impl Serialize, proof_len: usize) -> Result<Vec<u8>, HandshakeError> {
    let body = postcard::to_allocvec(body).map_err(|_| HandshakeError::Malformed(kind))?;
    let len = body.len() + proof_len;
    let announced = u16::try_from(len).ok().filter(|_| HEADER_LEN + len <= MAX_MESSAGE);
    let announced =
        announced.ok_or(HandshakeError::TooLarge { len: HEADER_LEN + len, limit: MAX_MESSAGE })?;
    let mut message = Vec::with_capacity(HEADER_LEN + len);
    message.extend_from_slice(&MAGIC);
    message.extend_from_slice(&[VERSION, kind as u8]);
    message.extend_from_slice(&announced.to_le_bytes());
    message.extend_from_slice(&body);
    Ok(message)
}

/// Reads a body to its last byte.
fn decode<T: DeserializeOwned>(kind: Kind, body: &[u8]) -> Result<T, HandshakeError> {
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        _ => Err(HandshakeError::Malformed(kind)),
    }
}

/// What tells the secrets of a job apart without telling them: too short to be of use elsewhere.
pub fn fingerprint(secret: &[u8], job: &str) -> String {
    let mut mac = keyed(secret);
    mac.update(format!("tensorcall secret of job {job}").as_bytes());
    let mut start = [0; 8];
    start.copy_from_slice(&mac.finalize().into_bytes()[..FINGERPRINT_LEN]);
    format!("{:016x}", u64::from_be_bytes(start))
}

#[expect(
    clippy::expect_used,
    reason = "HMAC takes keys of any length: a long one is hashed, a short one padded"
)]
fn keyed(secret: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(secret).expect("a key of any length")
}

/// Magic, version, kind, length of what follows (little-endian).
const HEADER_LEN: usize = 8;
const MAGIC: [u8; 4] = *b"TCHS";
const PROOF_LEN: usize = 32;
const FINGERPRINT_LEN: usize = 8;
/// How much of a stranger's first words an error shows.
const SHOWN_BYTES: usize = 16;

//! Opening a connection: both ends prove that they know the job's secret, and say who they are.
//!
//! ```text
//! initiator                                  responder
//!    Hello     job, nonce          ───────►
//!              ◄───────            Challenge  nonce
//!    Auth      who I am, whom I    ───────►
//!              want, role, proof
//!              ◄───────            Welcome    who I am, proof      or Reject  code, text, proof
//! ```
//!
//! A proof is an HMAC-SHA256 over everything that both have said and the side that proves, so one from
//! another connection (replay) or of the other side (reflection) does not hold; it is compared in
//! constant time. Until the initiator has proved the secret the responder tells it a nonce and nothing
//! else, except that the version differs. Nonces are passed in and must be fresh random bytes.
//!
//! At most [`MAX_MESSAGE`] bytes are buffered. The time limit and the number of places for strangers are
//! the driver's. `docs/security.md` says against whom all this helps.

mod envelope;
mod error;

use std::fmt;

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use self::envelope::{Envelope, Opened, Proof, Received};
pub use self::envelope::{Kind, MAX_MESSAGE, Nonce, fingerprint};
pub use self::error::{HandshakeError, RejectCode};
use crate::ids::{Identity, Incarnation, Rank};

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Role {
    /// Messages both ways: the only role so far.
    Calls = 0,
}

/// Whom an initiator wants to talk to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expect {
    /// The worker.
    pub rank: Rank,
    /// A certain life of it; `None` takes whichever is there.
    pub incarnation: Option<Incarnation>,
}

/// What both ends have when a handshake is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Established {
    /// Who is at the other end, proved.
    pub peer: Identity,
    /// What the connection is for.
    pub role: Role,
    /// Bytes that came after the handshake: the first of the connection.
    pub leftover: Vec<u8>,
}

/// The end that opened the connection.
pub struct Initiator {
    common: Common,
    expect: Expect,
    nonce: Nonce,
    awaited: Kind,
}

/// The end that accepted the connection.
pub struct Responder {
    common: Common,
    nonce: Nonce,
    /// What the initiator said first, once it has.
    hello: Option<Hello>,
}

/// What both ends keep.
struct Common {
    envelope: Envelope,
    me: Identity,
    job: String,
    role: Role,
    outcome: Outcome,
}

enum Outcome {
    Open,
    Failed(HandshakeError),
    Done(Option<Identity>),
}

#[derive(Serialize, Deserialize)]
struct Hello {
    nonce: Nonce,
    job: String,
}

#[derive(Serialize, Deserialize)]
struct Challenge {
    nonce: Nonce,
}

#[derive(Serialize, Deserialize)]
struct Auth {
    /// The challenge's nonce; first, see [`Opened::answers`].
    answers: Nonce,
    me: Identity,
    rank: Rank,
    incarnation: Option<Incarnation>,
    role: u8,
}

#[derive(Serialize, Deserialize)]
struct Welcome {
    /// The hello's nonce; first, see [`Opened::answers`].
    answers: Nonce,
    me: Identity,
}

#[derive(Serialize, Deserialize)]
struct Reject {
    code: u8,
    text: String,
}

impl Initiator {
    /// Has its first message ready: `me` calls `expect` for `role`. `job` has at most
    /// [`MAX_JOB_LEN`] bytes; a longer one fails at the first [`Initiator::feed`].
    pub fn new(secret: &[u8], job: &str, me: Identity, expect: Expect, role: Role, nonce: Nonce) -> Self {
        let mut common = Common::new(secret, job, me);
        common.role = role;
        let hello = Hello { nonce, job: common.job.clone() };
        if let Err(error) = common.envelope.send(Kind::Hello, &hello) {
            common.outcome = Outcome::Failed(error);
        }
        Self { common, expect, nonce, awaited: Kind::Challenge }
    }

    /// Bytes came, cut anywhere.
    ///
    /// # Errors
    ///
    /// What is wrong with them. The handshake is over then and every later call says the same; close
    /// the connection.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), HandshakeError> {
        while self.common.is_open()? && !bytes.is_empty() {
            if let Err(error) = self.step(&mut bytes) {
                self.common.outcome = Outcome::Failed(error);
            }
        }
        self.common.envelope.leftover.extend_from_slice(bytes);
        Ok(())
    }

    /// Bytes to send now, if any.
    pub fn poll_send(&mut self) -> Option<Vec<u8>> {
        self.common.envelope.poll_send()
    }

    /// The result, once: both ends have proved themselves.
    pub fn done(&mut self) -> Option<Established> {
        self.common.take_established()
    }

    /// What it means that the connection closed now, before [`Initiator::done`].
    pub fn closed(&self) -> HandshakeError {
        match self.common.closed(self.awaited) {
            HandshakeError::Truncated { expected: Kind::Welcome, received: 0 } => {
                HandshakeError::ProofRefused
            }
            error => error,
        }
    }

    fn step(&mut self, bytes: &mut &[u8]) -> Result<(), HandshakeError> {
        let expected: &[Kind] = match self.awaited {
            Kind::Challenge => &[Kind::Challenge],
            _ => &[Kind::Welcome, Kind::Reject],
        };
        let Some(message) = self.common.envelope.read(bytes, expected)? else {
            return Ok(());
        };
        match message.kind {
            Kind::Challenge => self.handle_challenge(&message),
            Kind::Reject => Err(self.handle_reject(&message)),
            _ => self.handle_welcome(&message),
        }
    }

    fn handle_challenge(&mut self, message: &Received) -> Result<(), HandshakeError> {
        let challenge: Challenge = self.common.envelope.open(message)?;
        if challenge.nonce == self.nonce {
            return Err(HandshakeError::Reflected);
        }
        let auth = Auth {
            answers: challenge.nonce,
            me: self.common.me.clone(),
            rank: self.expect.rank,
            incarnation: self.expect.incarnation,
            role: self.common.role as u8,
        };
        self.awaited = Kind::Welcome;
        self.common.envelope.send_proved(Kind::Auth, &auth, Proof::Initiator)
    }

    fn handle_welcome(&mut self, message: &Received) -> Result<(), HandshakeError> {
        let opened = self.common.envelope.open_proved(message, Proof::Responder)?;
        check_proof(&opened, &self.nonce)?;
        let Welcome { me: peer, .. } = opened.body()?;
        if peer == self.common.me {
            return Err(HandshakeError::Reflected);
        }
        check_identity(self.expect, &peer)?;
        self.common.outcome = Outcome::Done(Some(peer));
        Ok(())
    }

    fn handle_reject(&mut self, message: &Received) -> HandshakeError {
        let opened = match self.common.envelope.open_proved(message, Proof::Refusal) {
            Ok(opened) => opened,
            Err(error) => return error,
        };
        if !opened.is_proved {
            return HandshakeError::ForgedRefusal;
        }
        match opened.body() {
            Ok(Reject { code, text }) => HandshakeError::Rejected { code: RejectCode::from_wire(code), text },
            Err(error) => error,
        }
    }
}

impl Responder {
    /// Waits for the initiator's first message. `job` has at most [`MAX_JOB_LEN`] bytes; with a longer
    /// one nobody is welcome.
    pub fn new(secret: &[u8], job: &str, me: Identity, nonce: Nonce) -> Self {
        Self { common: Common::new(secret, job, me), nonce, hello: None }
    }

    /// Bytes came, cut anywhere.
    ///
    /// # Errors
    ///
    /// What is wrong with them. The handshake is over then and every later call says the same: send
    /// what [`Responder::poll_send`] still has, a refusal perhaps, and close the connection.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), HandshakeError> {
        while self.common.is_open()? && !bytes.is_empty() {
            if let Err(error) = self.step(&mut bytes) {
                self.common.outcome = Outcome::Failed(error);
            }
        }
        self.common.envelope.leftover.extend_from_slice(bytes);
        Ok(())
    }

    /// Bytes to send now, if any. Look also after an error and after [`Responder::done`].
    pub fn poll_send(&mut self) -> Option<Vec<u8>> {
        self.common.envelope.poll_send()
    }

    /// The result, once: the initiator has proved itself, and our proof is ready to be sent.
    pub fn done(&mut self) -> Option<Established> {
        self.common.take_established()
    }

    /// Whether the initiator has named this very job: it is a member, most likely.
    pub fn knows_job(&self) -> bool {
        self.hello.as_ref().is_some_and(|hello| hello.job == self.common.job)
    }

    /// What it means that the connection closed now, before [`Responder::done`].
    pub fn closed(&self) -> HandshakeError {
        self.common.closed(self.awaited())
    }

    fn awaited(&self) -> Kind {
        if self.hello.is_none() { Kind::Hello } else { Kind::Auth }
    }

    fn step(&mut self, bytes: &mut &[u8]) -> Result<(), HandshakeError> {
        let message = match self.common.envelope.read(bytes, &[self.awaited()]) {
            Ok(Some(message)) => message,
            Ok(None) => return Ok(()),
            Err(error) => return Err(self.tell_version(error)),
        };
        match message.kind {
            Kind::Hello => self.handle_hello(&message),
            _ => self.handle_auth(&message),
        }
    }

    fn handle_hello(&mut self, message: &Received) -> Result<(), HandshakeError> {
        let hello: Hello = self.common.envelope.open(message)?;
        if hello.job.len() > MAX_JOB_LEN {
            return Err(HandshakeError::JobTooLong { len: hello.job.len() });
        }
        if hello.nonce == self.nonce {
            return Err(HandshakeError::Reflected);
        }
        // A wrong job is told only to somebody who knows the secret.
        self.hello = Some(hello);
        self.common.envelope.send(Kind::Challenge, &Challenge { nonce: self.nonce })
    }

    fn handle_auth(&mut self, message: &Received) -> Result<(), HandshakeError> {
        let opened = self.common.envelope.open_proved(message, Proof::Initiator)?;
        if !opened.is_proved {
            // Two jobs rarely share a secret: the job explains more than the proof does.
            self.check_job()?;
        }
        check_proof(&opened, &self.nonce)?;
        let auth: Auth = opened.body()?;
        match self.check_job().and_then(|()| self.check_auth(&auth)) {
            Ok(role) => self.welcome(auth.me, role),
            Err(error) => Err(self.reject(error)),
        }
    }

    fn check_job(&self) -> Result<(), HandshakeError> {
        match &self.hello {
            Some(Hello { job, .. }) if *job != self.common.job => {
                let (ours, theirs) = (self.common.job.clone(), job.clone());
                Err(HandshakeError::WrongJob { ours, theirs })
            }
            _ => Ok(()),
        }
    }

    fn check_auth(&self, auth: &Auth) -> Result<Role, HandshakeError> {
        if auth.me == self.common.me {
            return Err(HandshakeError::Reflected);
        }
        let expect = Expect { rank: auth.rank, incarnation: auth.incarnation };
        check_identity(expect, &self.common.me)?;
        Role::from_wire(auth.role).ok_or(HandshakeError::UnknownRole(auth.role))
    }

    fn welcome(&mut self, peer: Identity, role: Role) -> Result<(), HandshakeError> {
        let answers = self.hello.as_ref().map(|hello| hello.nonce).unwrap_or_default();
        let welcome = Welcome { answers, me: self.common.me.clone() };
        self.common.envelope.send_proved(Kind::Welcome, &welcome, Proof::Responder)?;
        self.common.role = role;
        self.common.outcome = Outcome::Done(Some(peer));
        Ok(())
    }

    /// Tells a peer that proved the secret why it is refused.
    fn reject(&mut self, error: HandshakeError) -> HandshakeError {
        let reject = Reject { code: reject_code(&error).to_wire(), text: error.to_string() };
        // Our own texts are short; should one not fit, the peer sees the connection close.
        let _ = self.common.envelope.send_proved(Kind::Reject, &reject, Proof::Refusal);
        error
    }

    /// Tells a peer of another version so: it has no other way to know.
    fn tell_version(&mut self, error: HandshakeError) -> HandshakeError {
        if matches!(error, HandshakeError::Version { .. }) {
            let reject = Reject { code: RejectCode::Version.to_wire(), text: error.to_string() };
            let _ = self.common.envelope.send_bare(Kind::Reject, &reject);
        }
        error
    }
}

impl Common {
    fn new(secret: &[u8], job: &str, me: Identity) -> Self {
        let outcome = match job.len() {
            len if len > MAX_JOB_LEN => Outcome::Failed(HandshakeError::JobTooLong { len }),
            _ => Outcome::Open,
        };
        Self { envelope: Envelope::new(secret), me, job: job.to_owned(), role: Role::Calls, outcome }
    }

    fn is_open(&self) -> Result<bool, HandshakeError> {
        match &self.outcome {
            Outcome::Open => Ok(true),
            Outcome::Failed(error) => Err(error.clone()),
            Outcome::Done(_) => Ok(false),
        }
    }

    fn take_established(&mut self) -> Option<Established> {
        let Outcome::Done(peer) = &mut self.outcome else {
            return None;
        };
        let leftover = std::mem::take(&mut self.envelope.leftover);
        Some(Established { peer: peer.take()?, role: self.role, leftover })
    }

    fn closed(&self, expected: Kind) -> HandshakeError {
        match &self.outcome {
            Outcome::Failed(error) => error.clone(),
            _ => HandshakeError::Truncated { expected, received: self.envelope.received() },
        }
    }
}

impl Role {
    fn from_wire(role: u8) -> Option<Self> {
        (role == Self::Calls as u8).then_some(Self::Calls)
    }
}

// The secret and the nonces stay out of logs.
impl fmt::Debug for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Initiator")
            .field("expect", &self.expect)
            .field("awaited", &self.awaited)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Responder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Responder")
            .field("me", &self.common.me)
            .field("awaited", &self.awaited())
            .finish_non_exhaustive()
    }
}

/// A proof that does not hold is a replay if it answers another nonce than ours.
fn check_proof(opened: &Opened, nonce: &Nonce) -> Result<(), HandshakeError> {
    let is_ours = opened.answers().is_some_and(|answers| bool::from(answers.ct_eq(nonce)));
    match (is_ours, opened.is_proved) {
        (true, true) => Ok(()),
        (true, false) => Err(HandshakeError::WrongSecret),
        (false, _) => Err(HandshakeError::Replayed),
    }
}

fn check_identity(expect: Expect, found: &Identity) -> Result<(), HandshakeError> {
    if found.rank != expect.rank {
        return Err(HandshakeError::WrongRank { expected: expect.rank, found: found.rank });
    }
    match expect.incarnation {
        Some(expected) if expected != found.incarnation => {
            let (rank, found) = (found.rank, found.incarnation);
            Err(HandshakeError::WrongIncarnation { rank, expected, found })
        }
        _ => Ok(()),
    }
}

fn reject_code(error: &HandshakeError) -> RejectCode {
    match error {
        HandshakeError::WrongJob { .. } => RejectCode::Job,
        HandshakeError::WrongRank { .. } => RejectCode::Rank,
        HandshakeError::WrongIncarnation { .. } => RejectCode::Incarnation,
        HandshakeError::UnknownRole(_) => RejectCode::Role,
        HandshakeError::Reflected => RejectCode::Reflected,
        _ => RejectCode::Other(0),
    }
}

/// The most bytes that a job id has. Workers of different jobs refuse each other.
pub const MAX_JOB_LEN: usize = 256;

#[cfg(test)]
mod tests;

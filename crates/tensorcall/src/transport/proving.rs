//! Proving each other, whatever the bytes travel on.

use std::io;

use tensorcall_proto::handshake::{Expect, Initiator, Responder, Role};
use tensorcall_proto::ids::Identity;

/// Who we are and what proves it.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub(crate) me: Identity,
    pub(crate) job: String,
    pub(crate) secret: Vec<u8>,
}

/// One end of a handshake.
pub(crate) enum Handshake {
    Initiator(Initiator),
    Responder(Responder),
}

impl Handshake {
    /// The end that opens a link to `peer`.
    pub(crate) fn to(peer: &Identity, credentials: &Credentials) -> io::Result<Self> {
        let Credentials { me, job, secret } = credentials;
        let expect = Expect { rank: peer.rank, incarnation: Some(peer.incarnation) };
        Ok(Self::Initiator(Initiator::new(secret, job, me.clone(), expect, Role::Calls, nonce()?)))
    }

    /// The end that is called.
    pub(crate) fn responder(credentials: &Credentials) -> io::Result<Self> {
        let Credentials { me, job, secret } = credentials;
        Ok(Self::Responder(Responder::new(secret, job, me.clone(), nonce()?)))
    }

    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Result<(), String> {
        match self {
            Self::Initiator(side) => side.feed(bytes).map_err(|error| error.to_string()),
            Self::Responder(side) => side.feed(bytes).map_err(|error| error.to_string()),
        }
    }

    /// Whether the peer has named our job.
    pub(crate) fn knows_job(&self) -> bool {
        match self {
            Self::Initiator(_) => true,
            Self::Responder(side) => side.knows_job(),
        }
    }

    /// What it means that the peer closes the connection now.
    pub(crate) fn closed(&self) -> String {
        match self {
            Self::Initiator(side) => side.closed().to_string(),
            Self::Responder(side) => side.closed().to_string(),
        }
    }

    pub(crate) fn poll_send(&mut self) -> Option<Vec<u8>> {
        match self {
            Self::Initiator(side) => side.poll_send(),
            Self::Responder(side) => side.poll_send(),
        }
    }

    pub(crate) fn done(&mut self) -> Option<(Identity, Vec<u8>)> {
        let established = match self {
            Self::Initiator(side) => side.done(),
            Self::Responder(side) => side.done(),
        };
        established.map(|established| (established.peer, established.leftover))
    }
}

fn nonce() -> io::Result<[u8; 32]> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

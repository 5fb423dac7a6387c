//! Which job it is, and the secret that its workers share.

use serde::{Deserialize, Serialize};
use tensorcall_proto::handshake::fingerprint;

use super::{Failure, read_json, write_json};
use crate::agent::PeerInfo;
use crate::config;
use crate::error::{Error, Result};
use crate::store::Store;
use crate::transport::Address;

pub(super) const NO_SECRET: &str = "this job has a secret that only its workers know, but this worker was given none: \
                                    set TENSORCALL_SECRET or TENSORCALL_SECRET_FILE as on the other workers";

const MIXED: &str = "RPC group mixes statically and dynamically initialized members which is not supported.";

/// A job, as this worker knows it.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: String,
    /// `None` if the others were given one and this worker was not.
    pub(super) secret: Option<Vec<u8>>,
    /// Whether the secret is in the store.
    is_public: bool,
}

/// What the first worker leaves in the store.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Agreed {
    #[serde(default)]
    job: String,
    #[serde(default)]
    secret: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dynamic: Option<bool>,
}

/// Says that the workers that meet there do so in a dynamic group.
pub(super) fn mark_dynamic(keys: &dyn Store) -> Result<(), Failure> {
    let found = keys.compare_set("job", b"", br#"{"dynamic": true}"#)?;
    let found: Agreed = read_json("job", &found)?;
    if found.dynamic.is_none() {
        return Err(Error::usage(MIXED).into());
    }
    Ok(())
}

/// The job's id and secret: those of whoever came first. `configured` is a secret that the program gives.
pub(super) fn agree(keys: &dyn Store, configured: &[u8]) -> Result<Job, Failure> {
    let given = if configured.is_empty() { config::given_secret()? } else { Some(configured.to_vec()) };
    let secret = if given.is_none() { Some(random_hex::<32>()?) } else { None };
    let proposal = Agreed { job: random_hex::<16>()?, secret, dynamic: None };
    let agreed = keys.compare_set("job", b"", write_json(&proposal)?.as_bytes())?;
    let Agreed { job: id, secret, dynamic } = read_json("job", &agreed)?;
    if dynamic.is_some() {
        return Err(Error::usage(MIXED).into());
    }
    if given.is_some() {
        return Ok(Job { id, secret: given, is_public: false });
    }
    let secret =
        secret.map(|text| from_hex(&text).ok_or_else(|| Error::usage("the job's secret is no number")));
    Ok(Job { id, secret: secret.transpose()?, is_public: true })
}

impl Job {
    /// What tells secrets apart without telling them.
    pub(super) fn fingerprint(&self) -> Option<String> {
        self.secret.as_ref().map(|secret| fingerprint(secret, &self.id))
    }

    /// Says so if other hosts can reach this worker, whose secret is in the store.
    pub(super) fn warn_if_reachable(&self, me: &PeerInfo) {
        for address in &me.addresses {
            if let Address::Tcp(at) = address
                && self.is_public
                && !at.ip().is_loopback()
            {
                tracing::warn!(
                    "listening on {at} with a secret that is in the store: whoever can read the store can run code \
                     here; set TENSORCALL_SECRET or TENSORCALL_SECRET_FILE on all workers"
                );
            }
        }
    }
}

/// Random bytes as text.
pub(super) fn random_hex<const LEN: usize>() -> Result<String> {
    let mut bytes = [0; LEN];
    getrandom::fill(&mut bytes).map_err(|error| Error::io("no random numbers", error))?;
    Ok(bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}")))
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    let pairs = digits.chunks(2).map(|pair| match pair {
        [_, _] => u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok(),
        _ => None,
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    #[test]
    fn all_agree_on_what_the_first_one_says() {
        let store = MemoryStore::new();

        let [one, other] = [agree(&store, b""), agree(&store, b"")].map(|job| job.ok().unwrap());

        assert_eq!((&one.id, &one.secret), (&other.id, &other.secret));
        assert_eq!((one.id.len(), one.secret.as_ref().unwrap().len()), (32, 32));
        assert_eq!(one.fingerprint(), other.fingerprint());
        assert_eq!(one.fingerprint().unwrap().len(), 16);
    }

    #[test]
    fn a_given_secret_does_not_go_through_the_store() {
        let store = MemoryStore::new();

        let job = agree(&store, b"xyzzy").ok().unwrap();

        assert_eq!(job.secret.as_deref(), Some(&b"xyzzy"[..]));
        let text = String::from_utf8(store.get("job").unwrap().unwrap()).unwrap();
        assert!(text.contains(r#""secret":null"#), "{text}");
        assert!(agree(&store, b"").ok().unwrap().secret.is_none());
    }

    #[test]
    fn static_and_dynamic_members_do_not_mix() {
        let text = |failure| match failure {
            Err(Failure::Told(error)) => error.to_string(),
            _ => panic!("no error"),
        };
        let (one, other) = (MemoryStore::new(), MemoryStore::new());
        assert!(mark_dynamic(&one).is_ok() && mark_dynamic(&one).is_ok());
        assert!(agree(&other, b"").is_ok());

        assert!(text(agree(&one, b"").map(drop)).contains("mixes"));
        assert!(text(mark_dynamic(&other)).contains("mixes"));
    }

    #[test]
    fn numbers_read_as_they_are_written() {
        assert_eq!(from_hex("00ff7a"), Some(vec![0, 255, 122]));
        assert_eq!([from_hex("0"), from_hex("xx"), from_hex("é1")], [None, None, None]);
    }
}

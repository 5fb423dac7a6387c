//! What launchers tell the processes that they start, by environment variables.
//! The table is in [`rendezvous`](super). The first launcher whose rank is set counts: mpirun within a job of
//! Slurm leaves Slurm's variables, which then are those of its own helper. Where to meet is looked for in all.

use std::str::FromStr;

use crate::error::{Error, Result};

/// Looks a variable up.
pub(super) type Look<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Ports that are derived from the name of a job: below those that systems give out, above the well-known.
const FIRST_PORT: u16 = 20_000;
const PORTS: u32 = 12_000;

/// What launchers call the rank, the size, and how many ranks are on this host.
const LAUNCHERS: [Launcher; 4] = [
    Launcher { rank: "RANK", sizes: &["WORLD_SIZE"], local_size: "" },
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        sizes: &["OMPI_COMM_WORLD_SIZE"],
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Launcher { rank: "PMI_RANK", sizes: &["PMI_SIZE"], local_size: "MPI_LOCALNRANKS" },
    Launcher { rank: "SLURM_PROCID", sizes: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"], local_size: "" },
];

struct Launcher {
    rank: &'static str,
    sizes: &'static [&'static str],
    local_size: &'static str,
}

/// This worker's rank and how many workers there are.
pub(super) fn rank_and_size(look: Look<'_>) -> Result<(Option<u32>, Option<u32>)> {
    let Some(launcher) = LAUNCHERS.iter().find(|launcher| look(launcher.rank).is_some()) else {
        return Ok((None, number(look, "WORLD_SIZE")?));
    };
    Ok((number(look, launcher.rank)?, launcher.size(look)?))
}

/// Where the workers meet.
///
/// # Errors
///
/// If nothing says that.
pub(super) fn meeting_place(look: Look<'_>) -> Result<(String, u16)> {
    let host = match look("MASTER_ADDR") {
        Some(host) => host,
        None => derived_host(look)?.ok_or_else(|| nowhere("MASTER_ADDR", "host"))?,
    };
    let port = match number(look, "MASTER_PORT")? {
        Some(port) => port,
        None => derived_port(look).ok_or_else(|| nowhere("MASTER_PORT", "port"))?,
    };
    Ok((host, port))
}

/// Whether the launcher hosts the store at this place, so that no worker does.
pub(super) fn hosts_store(look: Look<'_>, host: &str, port: u16) -> bool {
    look("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True")
        && look("MASTER_ADDR").as_deref() == Some(host)
        && look("MASTER_PORT").is_some_and(|text| text.trim().parse() == Ok(port))
}

pub(super) const NO_RANK: &str = "this worker's rank is not known: give it, or start the program by a launcher \
                                  that sets RANK (torchrun), OMPI_COMM_WORLD_RANK (Open MPI), PMI_RANK (MPICH) or \
                                  SLURM_PROCID (srun)";

pub(super) const NO_SIZE: &str = "the number of workers is not known: give it, or start the program by a launcher \
                                  that sets WORLD_SIZE (torchrun), OMPI_COMM_WORLD_SIZE (Open MPI), PMI_SIZE (MPICH) \
                                  or SLURM_NTASKS (srun)";

fn nowhere(variable: &str, what: &str) -> Error {
    Error::usage(format!(
        "it is not known where the workers meet: set {variable} on all of them, to the {what} of the worker of rank 0 \
         (torchrun does)"
    ))
}

impl Launcher {
    fn size(&self, look: Look<'_>) -> Result<Option<u32>> {
        let name = self.sizes.iter().find(|name| look(name).is_some());
        name.map_or(Ok(None), |name| number(look, name))
    }

    fn is_on_one_host(&self, look: Look<'_>) -> Result<bool> {
        let size = self.size(look)?;
        Ok(look(self.rank).is_some() && size.is_some() && number(look, self.local_size)? == size)
    }
}

fn derived_host(look: Look<'_>) -> Result<Option<String>> {
    let loopback = Some("127.0.0.1".to_owned());
    for launcher in &LAUNCHERS {
        if launcher.is_on_one_host(look)? {
            return Ok(loopback);
        }
    }
    if ["SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"].iter().find_map(|name| look(name)).as_deref()
        == Some("1")
    {
        return Ok(loopback);
    }
    let nodes = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"].iter().find_map(|name| look(name));
    Ok(nodes.map(|nodes| first_node(&nodes)).filter(|node| !node.is_empty()))
}

fn derived_port(look: Look<'_>) -> Option<u16> {
    let job = look("PMIX_NAMESPACE").filter(|_| look("OMPI_COMM_WORLD_RANK").is_some());
    let job = job.or_else(|| {
        Some(format!("{}.{}", look("SLURM_JOB_ID")?, look("SLURM_STEP_ID").unwrap_or_default()))
    })?;
    // FNV-1a: any spread will do, as long as all workers have the same.
    let hash =
        job.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    u16::try_from(u32::from(FIRST_PORT) + hash % PORTS).ok()
}

/// The first host of a list as Slurm writes it: `a,b`, `node[01-04,07],other`, `r[1-2]n[3,5]`.
fn first_node(list: &str) -> String {
    let mut node = String::new();
    let mut rest = list.chars();
    while let Some(next) = rest.next() {
        match next {
            ',' => break,
            '[' => {
                let range: String = rest.by_ref().take_while(|c| *c != ']').collect();
                node.extend(range.chars().take_while(|c| !matches!(c, ',' | '-')));
            }
            other => node.push(other),
        }
    }
    node
}

fn number<T: FromStr>(look: Look<'_>, name: &str) -> Result<Option<T>> {
    let Some(text) = look(name) else { return Ok(None) };
    let number = text.trim().parse().map_err(|_| {
        Error::usage(format!("environment variable {name} must be a number, but is {text:?}"))
    })?;
    Ok(Some(number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn environment(text: &'static str) -> impl Fn(&str) -> Option<String> {
        let pairs: HashMap<&str, &str> =
            text.split_whitespace().filter_map(|pair| pair.split_once('=')).collect();
        move |name| pairs.get(name).map(|value| (*value).to_owned())
    }

    #[test]
    fn each_launcher_is_understood() {
        for (text, rank, size, host, port) in [
            ("RANK=1 WORLD_SIZE=4 MASTER_ADDR=n MASTER_PORT=9", 1, 4, "n", Some(9)),
            (
                "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=prte-7",
                2,
                4,
                "127.0.0.1",
                None,
            ),
            ("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALNRANKS=2 MASTER_PORT=9", 0, 2, "127.0.0.1", Some(9)),
            ("SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_JOB_NODELIST=n[07-09] SLURM_JOB_ID=5", 3, 4, "n07", None),
            (
                "SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=4 SLURM_JOB_NUM_NODES=1 SLURM_JOB_ID=5",
                3,
                4,
                "127.0.0.1",
                None,
            ),
            // mpirun in a job of Slurm: whose variables are those of mpirun's helper.
            (
                "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_NODELIST=a,b SLURM_JOB_ID=5",
                2,
                4,
                "a",
                None,
            ),
        ] {
            let look = environment(text);
            assert_eq!(rank_and_size(&look).unwrap(), (Some(rank), Some(size)), "{text}");
            let (found, at) = meeting_place(&look).unwrap();
            assert_eq!(found, host, "{text}");
            assert!(port.map_or((20_000..32_000).contains(&at), |port| at == port), "{text}: {at}");
        }
    }

    #[test]
    fn all_workers_of_a_job_derive_one_port_and_those_of_another_job_another() {
        let port = |text| meeting_place(&environment(text)).unwrap().1;

        assert_eq!(
            port("SLURM_JOB_NODELIST=a SLURM_JOB_ID=5 SLURM_PROCID=0"),
            port("SLURM_JOB_NODELIST=a SLURM_JOB_ID=5 SLURM_PROCID=1")
        );
        assert_ne!(port("SLURM_JOB_NODELIST=a SLURM_JOB_ID=5"), port("SLURM_JOB_NODELIST=a SLURM_JOB_ID=6"));
    }

    #[test]
    fn what_is_missing_or_no_number_is_named() {
        assert_eq!(rank_and_size(&environment("")).unwrap(), (None, None));
        assert_eq!(rank_and_size(&environment("RANK=0")).unwrap(), (Some(0), None));
        for (text, name) in [
            ("MASTER_PORT=1", "MASTER_ADDR"),
            ("MASTER_ADDR=h", "MASTER_PORT"),
            ("MASTER_ADDR=h MASTER_PORT=x", "MASTER_PORT"),
            ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2", "MASTER_ADDR"),
        ] {
            let error = meeting_place(&environment(text)).unwrap_err();
            assert!(error.to_string().contains(name), "{text}: {error}");
        }
        let error = rank_and_size(&environment("RANK=one")).unwrap_err();
        assert!(error.to_string().contains("RANK must be a number"), "{error}");
    }

    #[test]
    fn the_first_node_of_a_list_is_found() {
        for (list, node) in [
            ("n1", "n1"),
            ("a,b", "a"),
            ("node[01-04,07],other", "node01"),
            ("node[7,9]", "node7"),
            ("r[1-2]n[3,5]", "r1n3"),
            ("n[5].local,x", "n5.local"),
            ("", ""),
            ("n[1", "n1"),
        ] {
            assert_eq!(first_node(list), node, "{list}");
        }
    }

    #[test]
    fn torchrun_hosts_the_store_at_its_own_place_only() {
        let look = environment("TORCHELASTIC_USE_AGENT_STORE=True MASTER_ADDR=h MASTER_PORT=5");

        assert!(hosts_store(&look, "h", 5));
        assert!(!hosts_store(&look, "h", 6));
        assert!(!hosts_store(&environment("MASTER_ADDR=h MASTER_PORT=5"), "h", 5));
    }
}

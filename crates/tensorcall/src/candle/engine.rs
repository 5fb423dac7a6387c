//! [`Candle`]: candle's autograd as the local engine of a worker.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::Tensor;
use tensorcall_proto::autograd::{Pass as PassInfo, Plan};
use tensorcall_proto::ids::PassId;

use super::deep;
use super::error::Problem;
use super::pass::Pass;
use crate::autograd::{Arrived, Contexts, Found, LocalEngine, PassError, Roots};
use crate::sync::Mutex;

/// The tensors that a pass begins with.
pub(super) struct RootTensors(pub(super) Vec<Tensor>);

/// See the module.
pub(super) struct Candle {
    contexts: Arc<Contexts>,
    passes: Mutex<HashMap<PassId, Pass>>,
}

impl Candle {
    pub(super) fn new(contexts: Arc<Contexts>) -> Self {
        Self { contexts, passes: Mutex::default() }
    }
}

impl LocalEngine for Candle {
    fn plan(&self, pass: &PassInfo, roots: Option<Roots>) -> Result<Plan, PassError> {
        let roots = roots.map(|roots| match roots.downcast::<RootTensors>() {
            Ok(roots) => Ok(roots.0.clone()),
            Err(_) => Err(Problem::Roots),
        });
        let roots = roots.transpose()?;
        let Some(tape) = self.contexts.find(pass.context) else {
            // The message that should have brought it never arrived.
            return Ok(Plan::default());
        };
        let (made, plan) = deep::run(|| Pass::new(tape, roots))??;
        self.passes.lock().insert(pass.id, made);
        Ok(plan)
    }

    fn vjp(
        &self,
        pass: &PassInfo,
        arrived: Vec<Arrived>,
        wanted: &[u64],
        last: bool,
    ) -> Result<Vec<Found>, PassError> {
        // One thing at a time is asked for in a pass: nobody misses it meanwhile.
        let mut current = self.passes.lock().remove(&pass.id).ok_or(Problem::NoPass)?;
        let found = current.advance(arrived, wanted, last)?;
        self.passes.lock().insert(pass.id, current);
        Ok(found)
    }

    fn end(&self, pass: &PassInfo, _: Option<&PassError>) {
        let ended = self.passes.lock().remove(&pass.id);
        // Not under the lock: it may let go of a graph.
        drop(ended);
    }
}

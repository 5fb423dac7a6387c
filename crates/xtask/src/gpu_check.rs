//! `cargo xtask gpu-check`: what needs a CUDA device, on a machine that has one. Elsewhere it says so and passes.

use crate::{plan::Plan, process::run, project::Project};

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project) {
    plan.step("calls with CUDA tensors", |_| {
        run(project.python().args(["-m", "tensorcall", "run", "examples/cuda_calls.py"]))
    });
    plan.step("torch's own RPC tests that need a CUDA device", |_| {
        // Those that need more devices than there are skip themselves.
        let tests = "TensorPipe(TensorPipe|TensorPipeAgent)?Cuda(Rpc|DistAutograd|RemoteModule)Test";
        run(project.python().args(["python/tests/peer/run.py", "--all", "--limit", "60", "--filter", tests]))
    });
}

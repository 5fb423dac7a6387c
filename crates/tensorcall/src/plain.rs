//! Calls of functions that every worker has, in either language: by name, with plain data.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcall_proto::ids::Rank;
use tensorcall_proto::wire::message::{Encoding, FailureKind, FunctionRef};
use tensorcall_proto::wire::{Exception, Limits, Value};

use crate::agent::{Agent, InboundCall, Request, Responder, lend};
use crate::body::Body;
use crate::error::{Error, ErrorKind, Result};
use crate::future::{Response, RpcFuture};

/// Calls `function` on worker `to`.
pub(crate) fn call(
    agent: &Agent,
    to: Rank,
    function: &str,
    arguments: Vec<Value>,
    timeout: Option<Duration>,
    deadline: Option<Instant>,
) -> Result<RpcFuture> {
    let payload = Value::Tuple(vec![Value::Tuple(arguments), Value::Map(Vec::new())]);
    let payload = payload.encode(&Limits::default());
    let payload = payload
        .map_err(|error| Error::usage(format!("what {function} is to be told cannot be sent: {error}")))?;
    let label: Arc<str> = function.into();
    let request = Request {
        function: FunctionRef::Name(Arc::clone(&label)),
        label,
        encoding: Encoding::Value,
        body: Body::of(payload),
        timeout,
        deadline,
        creates: None,
    };
    agent.call(to, request)
}

/// The positional arguments of a call.
pub(crate) fn arguments_of(call: &InboundCall) -> Result<Vec<Value>, String> {
    if call.encoding != Encoding::Value {
        return Err("a Rust worker is told such things by plain data".to_owned());
    }
    match Value::decode(call.body.payload.as_ref(), &Limits::default()) {
        Ok(Value::Tuple(parts)) => match <[Value; 2]>::try_from(parts) {
            Ok([Value::Tuple(arguments), _]) => Ok(arguments),
            _ => Err("a call has positional and named arguments".to_owned()),
        },
        Ok(_) => Err("the arguments of a call are a tuple".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Answers a call with what it returned, or with the text of an exception that a Python caller raises.
pub(crate) fn answer(responder: Responder, said: Result<Value, String>) {
    let limits = Limits::default();
    let encoded = match said {
        Ok(value) => value.encode(&limits).map(|payload| (false, payload)),
        Err(message) => {
            let (classes, origin) = ("builtins:RuntimeError".to_owned(), String::new());
            let raised = Value::Exception(Box::new(Exception { classes, message, origin }));
            raised.encode(&limits).map(|payload| (true, payload))
        }
    };
    match encoded {
        Ok((false, payload)) => responder.returned(Encoding::Value, Body::of(payload)),
        Ok((true, payload)) => responder.raised(Encoding::Value, Body::of(payload)),
        Err(error) => responder.failed(FailureKind::Internal, error.to_string()),
    }
}

/// What a call that returns nothing came to.
pub(crate) fn outcome(call: &RpcFuture) -> Result<()> {
    lend(None, || call.wait_until(None));
    match call.take() {
        Some(Ok(Response { raised: false, .. })) | None => Ok(()),
        Some(Ok(response)) => {
            let raised = Value::decode(response.body.payload.as_ref(), &Limits::default());
            let text = match raised {
                Ok(Value::Exception(raised)) => raised.message,
                _ => "it raised an exception".to_owned(),
            };
            Err(Error::new(ErrorKind::Remote, text))
        }
        Some(Err(error)) => Err(error),
    }
}

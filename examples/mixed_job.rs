//! How do a Rust program and a PyTorch program work in one job?
//!
//! The Rust worker `words` turns text into tensors; the Python worker `model` (`mixed_job.py`, which this program
//! starts too) has a network in PyTorch. Python trains it on tensors that it asks Rust for, through a reference to
//! a vocabulary that lives in Rust. Then Rust calls the network in Python, with sentences that neither has seen.
//! Nothing but tensors and plain data crosses, so neither needs the other's types.
//!
//! ```text
//! cargo run --release --example mixed_job
//! ```
//!
//! `PYTHON` names the interpreter, `python3` by default; it has torch and tensorcall.

#![allow(
    clippy::pedantic,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an ordinary program, which need not follow the habits of this repository"
)]

mod launch;

use std::error::Error;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tensorcall::{Agent, DType, Keep, RRef, Result, State, Tensor};

/// No wait of this program is longer.
const SOON: Duration = Duration::from_secs(40);

/// As many numbers stand for a sentence.
const FEATURES: usize = 512;

const UNSEEN: [(&str, &str); 4] = [
    ("the house stands near the river", "English"),
    ("das Haus steht nahe am Fluss", "German"),
    ("where does this train go", "English"),
    ("wohin fährt dieser Zug", "German"),
];

fn main() -> ExitCode {
    launch::run(&["words", "model"], |name| match name {
        "words" => words(),
        _ => become_python(),
    })
}

/// The Python worker takes the place of this process.
fn become_python() -> Result<(), Box<dyn Error>> {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/mixed_job.py");
    Err(format!("{python} cannot be started: {}", Command::new(&python).arg(program).exec()).into())
}

/// What Python refers to, and never sees: which parts of words it has been shown.
#[derive(Default)]
struct Vocabulary {
    sentences: Mutex<usize>,
}

/// Tells the main thread that the model can be asked.
type Ready = Arc<Mutex<Option<Sender<()>>>>;

fn words() -> Result<(), Box<dyn Error>> {
    let (sender, ready) = mpsc::channel();
    let agent = Agent::builder("words")
        .rendezvous(launch::meeting_place())
        .state::<Ready>(Arc::new(Mutex::new(Some(sender))))
        .function("new_vocabulary", || Keep(Vocabulary::default()))
        .function("encode", encode)
        .function("is_trained", is_trained)
        .start()?;
    ready.recv_timeout(SOON)?;

    let sentences = UNSEEN.map(|(sentence, _)| sentence.to_owned()).to_vec();
    let start = Instant::now();
    let languages: Vec<String> = agent.call_blocking("model", "classify", (features_of(&sentences)?,))?;
    let took = start.elapsed();
    for ((sentence, expected), language) in UNSEEN.iter().zip(&languages) {
        println!("words: the model in Python says of {sentence:?}: {language}");
        if language != expected {
            return Err(format!("but it is {expected}").into());
        }
    }
    println!("words: all right, by one call of {} us", took.as_micros());
    // What goes wrong in Python is an error here, with its class and its words.
    let wrong: Result<Vec<String>> = agent.call_blocking("model", "classify", (Tensor::scalar(1.0f32),));
    match wrong {
        Err(error) if error.remote().is_some_and(|raised| raised.is("ValueError")) => {
            println!("words: and a wrong tensor is refused: {error}");
        }
        other => return Err(format!("a wrong tensor was not refused: {other:?}").into()),
    }
    agent.shutdown()?;
    Ok(())
}

/// Called by Python: a tensor of one row for each sentence.
fn encode(vocabulary: RRef<Vocabulary>, sentences: Vec<String>) -> Result<Tensor> {
    let vocabulary = vocabulary.local()?;
    *vocabulary.sentences.lock().unwrap_or_else(std::sync::PoisonError::into_inner) += sentences.len();
    features_of(&sentences)
}

/// Called by Python when its network is trained, with what it has learnt from.
fn is_trained(State(ready): State<Ready>, vocabulary: RRef<Vocabulary>, loss: f64) -> Result<()> {
    let vocabulary = vocabulary.local()?;
    let sentences = *vocabulary.sentences.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    println!("words: the model is trained on {sentences} sentences of mine, to a loss of {loss:.4}");
    if let Some(ready) = ready.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take() {
        // If the main thread has given up, it has said why.
        let _ = ready.send(());
    }
    Ok(())
}

/// Counts the threes of letters of each sentence, in as many places as there are features.
fn features_of(sentences: &[String]) -> Result<Tensor> {
    let mut features = Tensor::zeros(DType::Float32, &[sentences.len(), FEATURES])?;
    let rows = features.as_mut_slice::<f32>()?.chunks_mut(FEATURES);
    for (row, sentence) in rows.zip(sentences) {
        let letters: Vec<char> = format!(" {} ", sentence.to_lowercase()).chars().collect();
        for three in letters.windows(3) {
            let number =
                three.iter().fold(7u32, |number, &letter| number.wrapping_mul(31) ^ u32::from(letter));
            row[number as usize % FEATURES] += 1.0;
        }
    }
    Ok(features)
}

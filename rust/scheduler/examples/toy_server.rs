//! A text server in one file: TCP lines in, generated text out, many clients in one batch.
//!
//! ```text
//! cargo run -p dsserve-scheduler --example toy_server -- 127.0.0.1:7070    # then: nc 127.0.0.1 7070
//! cargo run -p dsserve-scheduler --example toy_server -- --demo            # a few requests, no network
//! ```
//!
//! The vocabulary is the 256 bytes, and the model continues a text with the byte that followed the last
//! three bytes when they were seen before. All the rest is real: continuous batching, a prefix cache with
//! pages, steps planned before the last result is known, streaming, disconnects.
use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use dsserve_scheduler::{
    FinishCode, RequestSpec, Scheduler, SchedulerConfig, StepOutputs, StepPlan, SAMPLED, STATUS_OK,
};

const END_OF_LINE: u32 = 10;
const MAX_NEW_TOKENS: u32 = 64;

/// A prompt and where its text goes; a closed channel means that the client left.
struct Job {
    prompt: String,
    text: Sender<String>,
}

/// The "device": it knows the ids of each request, as KV would, and samples from them.
#[derive(Default)]
struct Model {
    ids: HashMap<u64, Vec<u32>>,
}

impl Model {
    /// Runs a step; one id for each request, -1 where nothing is sampled.
    fn run(&mut self, plan: &StepPlan) -> Vec<i32> {
        let sample = |index: usize| {
            if plan.samples[index] & SAMPLED == 0 {
                return -1;
            }
            let ids = self.ids.entry(plan.request_id[index]).or_default();
            let id = next_byte(ids);
            ids.push(id);
            i32::try_from(id).unwrap_or(-1)
        };
        (0..plan.request_id.len()).map(sample).collect()
    }
}

fn next_byte(ids: &[u32]) -> u32 {
    let Some(start) = ids.len().checked_sub(3) else {
        return END_OF_LINE;
    };
    let last = &ids[start..];
    let seen = (0..start).rev().find(|at| &ids[*at..at + 3] == last);
    seen.map_or(END_OF_LINE, |at| ids[at + 3])
}

/// Owns the scheduler; everything else talks to it through channels.
struct Engine {
    scheduler: Scheduler,
    model: Model,
    clients: HashMap<u64, Sender<String>>,
    /// Results of the steps in flight, oldest first.
    in_flight: VecDeque<(u64, Vec<i32>)>,
    next_id: u64,
    started: Instant,
}

impl Engine {
    fn new() -> dsserve_scheduler::Result<Self> {
        let scheduler = Scheduler::new(SchedulerConfig {
            page_size: 16,
            num_pages: 4096,
            max_running_requests: 32,
            chunked_prefill_size: 256,
            context_length: 4096,
            window: 16,
            vocab_size: 256,
            eos_token_ids: vec![END_OF_LINE],
            ..SchedulerConfig::default()
        })?;
        Ok(Self {
            scheduler,
            model: Model::default(),
            clients: HashMap::new(),
            in_flight: VecDeque::new(),
            next_id: 1,
            started: Instant::now(),
        })
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn submit(&mut self, job: Job) {
        let request_id = self.next_id;
        self.next_id += 1;
        let ids: Vec<u32> = job.prompt.bytes().map(u32::from).collect();
        let rejected = self.scheduler.submit(vec![RequestSpec {
            request_id,
            token_ids: ids.clone(),
            max_new_tokens: MAX_NEW_TOKENS,
            arrival_us: self.now_us(),
            ..RequestSpec::default()
        }]);
        if let Some(refused) = rejected.first() {
            // The client hears why, and its line ends; it may be gone, which is no concern here.
            let _ = job.text.send(format!("error: {}\n", refused.message));
            return;
        }
        self.model.ids.insert(request_id, ids);
        self.clients.insert(request_id, job.text);
    }

    /// Plans a step and puts it on the device, then takes the result of the one before.
    fn step(&mut self) -> dsserve_scheduler::Result<()> {
        let now_us = self.now_us();
        let may_plan = self.scheduler.steps_in_flight() < 2;
        let plan = if may_plan {
            self.scheduler.next_plan(now_us)?
        } else {
            None
        };
        let has_planned = plan.is_some();
        if let Some(plan) = plan {
            let step_id = plan.step_id;
            let results = self.model.run(plan);
            self.in_flight.push_back((step_id, results));
        }
        if self.in_flight.len() == 2 || !has_planned {
            if let Some((step_id, ids)) = self.in_flight.pop_front() {
                let status = vec![STATUS_OK; ids.len()];
                let outputs = self.scheduler.apply(step_id, &ids, &status, now_us)?;
                self.deliver(&outputs)?;
            }
        }
        let outputs = self.scheduler.take_outputs();
        self.deliver(&outputs)
    }

    fn deliver(&mut self, outputs: &StepOutputs) -> dsserve_scheduler::Result<()> {
        let mut left = Vec::new();
        for (index, request_id) in outputs.request_ids.iter().enumerate() {
            let range =
                outputs.token_offsets[index] as usize..outputs.token_offsets[index + 1] as usize;
            let bytes: Vec<u8> = (outputs.token_ids[range].iter())
                .filter_map(|id| u8::try_from(*id).ok())
                .collect();
            let mut text = String::from_utf8_lossy(&bytes).into_owned();
            let code = outputs.finish_codes[index];
            if code == FinishCode::Length {
                text.push('\n');
            }
            let client = self.clients.get(request_id);
            let is_gone = client.is_some_and(|client| client.send(text).is_err());
            if code != FinishCode::None {
                self.clients.remove(request_id);
                self.model.ids.remove(request_id);
            } else if is_gone {
                left.push(*request_id);
            }
        }
        self.scheduler.abort(&left)
    }

    /// Serves until nobody can send a job any more.
    fn run(&mut self, jobs: &Receiver<Job>) -> dsserve_scheduler::Result<()> {
        let mut is_open = true;
        while is_open || self.scheduler.has_work() {
            let wait = if self.scheduler.has_work() {
                Duration::ZERO
            } else {
                Duration::from_millis(100)
            };
            match jobs.recv_timeout(wait) {
                Ok(job) => self.submit(job),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => is_open = false,
            }
            self.step()?;
        }
        Ok(())
    }
}

fn serve_client(stream: TcpStream, jobs: &Sender<Job>) -> std::io::Result<()> {
    let mut writer = stream.try_clone()?;
    for line in BufReader::new(stream).lines() {
        let (text, pieces) = channel();
        let job = Job {
            prompt: line?,
            text,
        };
        if jobs.send(job).is_err() {
            break;
        }
        for piece in pieces {
            writer.write_all(piece.as_bytes())?;
        }
    }
    Ok(())
}

fn serve(address: &str) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(address)?;
    let (jobs, incoming) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let jobs = jobs.clone();
            std::thread::spawn(move || serve_client(stream, &jobs));
        }
    });
    Engine::new()?.run(&incoming)?;
    Ok(())
}

fn demo(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let story = "the cat sat on the mat and the cat ran to the man; ";
    let prompts = [
        format!("{story}the "),
        format!("{story}the c"),
        "one two three one two ".to_owned(),
        String::new(),
    ];
    let (jobs, incoming) = channel();
    let mut answers = Vec::new();
    for prompt in &prompts {
        let (text, pieces) = channel();
        jobs.send(Job {
            prompt: prompt.clone(),
            text,
        })?;
        answers.push(pieces);
    }
    drop(jobs);
    let mut engine = Engine::new()?;
    engine.run(&incoming)?;
    for (prompt, pieces) in prompts.iter().zip(answers) {
        let answer: String = pieces.into_iter().collect();
        write!(out, "{prompt:?} -> {answer}")?;
    }
    engine.scheduler.check_invariants()?;
    let counters = engine.scheduler.stats().counters;
    writeln!(
        out,
        "{} steps; {} of {} prompt tokens came from the cache",
        counters.prefill_steps + counters.decode_steps,
        counters.cached_tokens,
        counters.prompt_tokens
    )?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let argument = std::env::args().nth(1);
    match argument.as_deref() {
        Some("--demo") => demo(&mut std::io::stdout()),
        Some(address) => serve(address),
        None => Err("usage: toy_server ADDRESS | --demo".into()),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_demo_answers_every_prompt() {
        let mut out = Vec::new();
        super::demo(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5, "{text}");
        assert!(lines[1].contains("at ran to the man"), "{text}");
        assert!(lines[2].contains("three one two"), "{text}");
        assert!(
            lines[3].contains("error: the prompt has no tokens"),
            "{text}"
        );
    }
}

//! A server that says back what it is told, token by token, up to a stop string.
//!
//! `cargo run -p dsserve-tokenizer --example toy_server [tokenizer.json]`, then send lines to the printed
//! address, with `nc` say. Without a file it uses a tiny built-in tokenizer; with the argument `--once`
//! it talks to itself and ends.

use dsserve_tokenizer::{StopSet, StreamEnd, StreamOptions, StreamTable, TokenBatch, Tokenizer};
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn Error>> {
    let argument = std::env::args().nth(1);
    let once = argument.as_deref() == Some("--once");
    let path = match argument.filter(|_| !once) {
        Some(path) => PathBuf::from(path),
        None => dsserve_tokenizer::testing::example_tokenizer()?,
    };
    let tokenizer = Tokenizer::from_path(&path, 1)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    writeln!(std::io::stdout(), "listening on {}", listener.local_addr()?)?;
    if once {
        let mut client = TcpStream::connect(listener.local_addr()?)?;
        client.write_all("the end of it. STOP and no more\n".as_bytes())?;
        client.shutdown(std::net::Shutdown::Write)?;
        answer(&tokenizer, &listener.accept()?.0)?;
        let mut said = String::new();
        BufReader::new(client).read_line(&mut said)?;
        write!(std::io::stdout(), "{said}")?;
        return Ok(());
    }
    for connection in listener.incoming() {
        answer(&tokenizer, &connection?)?;
    }
    Ok(())
}

/// Streams every line back.
fn answer(tokenizer: &Tokenizer, connection: &TcpStream) -> Result<(), Box<dyn Error>> {
    let mut out = connection;
    let mut streams = StreamTable::new(Arc::clone(tokenizer.table()));
    for (name, line) in (0..).zip(BufReader::new(connection).lines()) {
        let ids = tokenizer.encode(&line?, false)?;
        let stop = StopSet::new(vec!["STOP".to_owned()])?.map(Arc::new);
        let options = StreamOptions {
            stop,
            ..StreamOptions::default()
        };
        streams.open(name, options)?;
        for (index, id) in ids.iter().enumerate() {
            let is_last = index + 1 == ids.len();
            let end = if is_last {
                StreamEnd::Ended
            } else {
                StreamEnd::Open
            };
            let batch = TokenBatch {
                names: &[name],
                offsets: &[0, 1],
                ids: &[*id],
                ends: &[end],
            };
            let pieces = streams.push(batch)?;
            let piece = pieces[0].as_ref().ok_or("the stream is open")?;
            out.write_all(piece.text.as_bytes())?;
            if piece.stop.is_some() {
                break;
            }
        }
        out.write_all(b"\n")?;
        streams.close(name);
    }
    Ok(())
}

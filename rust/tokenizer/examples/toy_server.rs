//! A server that says back what it is told, token by token, up to a stop string.
//!
//! `cargo run -p dsserve-tokenizer --example toy_server [tokenizer.json]`, then send lines to the printed
//! address, with `nc` say. Without a file it uses a tiny built-in tokenizer; with the argument `--demo`
//! it talks to itself and ends.

use dsserve_tokenizer::{StopSet, StreamEnd, StreamOptions, StreamTable, TokenBatch, Tokenizer};
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn Error>> {
    let argument = std::env::args().nth(1);
    if argument.as_deref() == Some("--demo") {
        return demo(&mut std::io::stdout());
    }
    let path = match argument {
        Some(path) => PathBuf::from(path),
        None => dsserve_tokenizer::testing::example_tokenizer()?,
    };
    let tokenizer = Tokenizer::from_path(&path, 1)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    writeln!(std::io::stdout(), "listening on {}", listener.local_addr()?)?;
    for connection in listener.incoming() {
        answer(&tokenizer, &connection?)?;
    }
    Ok(())
}

/// Says one line to itself and writes what comes back.
fn demo(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let path = dsserve_tokenizer::testing::example_tokenizer()?;
    let tokenizer = Tokenizer::from_path(&path, 1)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    client.write_all("the end of it. STOP and no more\nand again\n".as_bytes())?;
    client.shutdown(Shutdown::Write)?;
    answer(&tokenizer, &listener.accept()?.0)?;
    for line in BufReader::new(client).lines() {
        writeln!(out, "{}", line?)?;
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

#[cfg(test)]
mod tests {
    #[test]
    fn the_demo_says_each_line_up_to_the_stop() {
        let mut out = Vec::new();
        super::demo(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text, "the end of it. \nand again\n");
    }
}

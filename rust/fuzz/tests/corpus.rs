//! Every input of the corpus passes: among them are those that failed once.

use dsserve_fuzz::TARGETS;
use std::fs;
use std::path::Path;

#[test]
fn inputs_of_the_corpus_pass() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (name, run) in TARGETS {
        let mut num_inputs = 0;
        for entry in fs::read_dir(corpus.join(name)).expect("a folder for each target") {
            let path = entry.expect("readable").path();
            run(&fs::read(&path).expect("readable"));
            num_inputs += 1;
        }
        assert!(num_inputs > 3, "{name} has a corpus");
    }
}

//! Case f04 with real processes: this program starts itself as a writer, kills it at a random moment, and looks at what is
//! left, 200 times over one directory.

mod common;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

const WRITER: &str = "BLENDSTORE_TEST_WRITER";
const KILLS: u32 = 200;
const DISK: u64 = 24 << 20;

/// Stores records for ever, from a first number on, and says so once.
fn write_until_killed(directory: &str) -> ! {
    let first: u32 = std::env::var("BLENDSTORE_TEST_FIRST")
        .expect("set")
        .parse()
        .expect("a number");
    let store =
        common::open(directory.as_ref(), 8 << 20, DISK).expect("the killed one's lock is gone");
    println!("writing");
    for number in (first..).cycle() {
        common::store(&store, number);
        if number % 8 == 0 {
            store.flush(Duration::from_secs(5));
        }
    }
    unreachable!("numbers don't end")
}

#[test]
fn case_f04_two_hundred_kills() {
    if let Ok(directory) = std::env::var(WRITER) {
        write_until_killed(&directory);
    }
    let scratch = common::Scratch::new("kill");
    let segments = scratch.0.join("blendstore-v1");
    let mut known: BTreeSet<u32> = BTreeSet::new();
    let (mut random, mut first, mut torn) = (0x2545_f491_4f6c_dd1du64, 1000, 0);
    for kill in 0..KILLS {
        let mut writer = Command::new(std::env::current_exe().expect("this program"))
            .args([
                "case_f04_two_hundred_kills",
                "--exact",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(WRITER, &scratch.0)
            .env("BLENDSTORE_TEST_FIRST", first.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let mut lines = BufReader::new(writer.stdout.take().expect("piped")).lines();
        assert!(
            lines.any(|line| line.expect("text").ends_with("writing")),
            "kill {kill}: the writer begins"
        );
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        std::thread::sleep(Duration::from_micros(random % 12_000));
        writer.kill().expect("running");
        writer.wait().expect("killed");

        let store =
            common::open(&scratch.0, 64 << 20, DISK).expect("the killed one's lock is gone");
        let stats = store.tier_stats().remove(0).1;
        let files = std::fs::read_dir(&segments)
            .expect("there")
            .map(|entry| entry.expect("readable"));
        let sizes = files
            .filter(|file| file.file_name() != "lock")
            .map(|file| file.metadata().expect("there").len());
        let used: u64 = sizes.sum();
        assert_eq!(
            stats.bytes_used, used,
            "kill {kill}: usage equals the files"
        );
        assert!(used <= DISK, "kill {kill}: the cap holds");

        let range = first..first + 600;
        let numbers: Vec<u32> = known.iter().copied().chain(range).collect();
        let found = common::load(&store, &numbers);
        let there: BTreeSet<u32> = numbers
            .iter()
            .zip(&found)
            .filter(|(_, found)| **found)
            .map(|(number, _)| *number)
            .collect();
        assert_eq!(
            store.load_stats().refused,
            0,
            "kill {kill}: what is announced after a restart is whole"
        );
        let lost: Vec<&u32> = known.difference(&there).collect();
        if let (Some(lost), Some(kept)) = (lost.iter().max(), known.intersection(&there).min()) {
            // The oldest segments make room; nothing that is newer than something kept has been lost with them.
            assert!(
                **lost < *kept + 64,
                "kill {kill}: {lost} is lost, but {kept} is there"
            );
        }
        torn += u32::from(there.len() > known.len());
        first = there.iter().max().map_or(first, |last| last + 1).max(first);
        known = there;
        drop(store);
    }
    assert!(
        torn > KILLS / 4,
        "the writers had got somewhere in {torn} of {KILLS} cases"
    );
}

//! What happens to files under a running store or while it is away, and images of crashes.

use super::*;

/// Case f05: files deleted, truncated, flipped or exchanged under a running store are misses or the right bytes, counted, and
/// the next stores work.
#[test]
fn case_f05_files_changed_under_a_running_store() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 4] = [
        ("deleted", |file| fs::remove_file(file).expect("there")),
        ("truncated", |file| {
            OpenOptions::new()
                .write(true)
                .open(file)
                .and_then(|f| f.set_len(5000))
                .expect("there")
        }),
        ("flipped", |file| {
            let handle = OpenOptions::new()
                .read(true)
                .write(true)
                .open(file)
                .expect("there");
            for at in (4096..handle.metadata().expect("there").len()).step_by(512) {
                let mut byte = [0];
                handle.read_exact_at(&mut byte, at).expect("there");
                handle.write_all_at(&[byte[0] ^ 1], at).expect("writable");
            }
        }),
        ("zeroed", |file| {
            let handle = OpenOptions::new().write(true).open(file).expect("there");
            handle
                .write_all_at(&vec![0; 900 << 10], 4096)
                .expect("writable");
        }),
    ];
    for (what, damage) in damages {
        let scratch = Scratch::new();
        let disk = open(&scratch);
        let records = documents(60);
        put(&disk, &records.iter().collect::<Vec<_>>());
        let files = scratch.files();
        assert!(files.len() > 1, "sealed ones and an open one");
        damage(&files[0]);
        damage(files.last().expect("open"));
        let keys: Vec<Key> = records.iter().map(|made| made.key).collect();
        let mut missed = 0;
        for (found, made) in get(&disk, &keys).into_iter().zip(&records) {
            match found {
                Some(found) => assert_eq!(found, *made, "{what}"),
                None => missed += 1,
            }
        }
        let stats = disk.stats();
        assert_eq!(stats.errors.values().sum::<u64>(), missed, "{what}");
        assert_eq!(
            missed > 0,
            what != "deleted",
            "{what}: an open file outlives its name"
        );
        put(&disk, &records.iter().collect::<Vec<_>>());
        crash(disk);
        let disk = open(&scratch);
        for (found, made) in get(&disk, &keys).into_iter().zip(&records) {
            assert!(
                found.is_none_or(|found| found == *made),
                "{what}, after a restart"
            );
        }
    }
}

/// Case f05: a directory that somebody removes under a running store, to have its space, is made again and used on.
#[test]
fn case_f05_a_removed_directory_is_made_again() {
    let scratch = Scratch::new();
    let disk = open(&scratch);
    let records = documents(60);
    let all: Vec<&Made> = records.iter().collect();
    put(&disk, &all);
    fs::remove_dir_all(&scratch.0).expect("ours");
    for _ in 0..3 {
        put(&disk, &documents(120).iter().skip(60).collect::<Vec<_>>());
    }
    assert_eq!(
        disk.stats().bytes_used,
        scratch.bytes(),
        "what is gone is not counted"
    );
    let error = Disk::open(&options(&scratch)).expect_err("in use");
    assert_eq!(error.kind(), ErrorKind::AddrInUse, "{error}");
    assert!(put(&disk, &all) > 0);
    let known = disk.stats().records;
    drop(disk);
    assert_eq!(open(&scratch).stats().records, known);
}

/// A file that another put in the place of the next segment is left alone.
#[test]
fn a_foreign_segment_is_not_removed() {
    let scratch = Scratch::new();
    let disk = open(&scratch);
    let foreign = scratch
        .0
        .join("blendstore-v1")
        .join(format!("{:016x}.seg", 1));
    fs::write(&foreign, b"not ours").expect("writable");
    let records = documents(1);
    assert_eq!(put(&disk, &[&records[0]]), 0);
    assert_eq!(put(&disk, &[&records[0]]), 1, "with the next number");
    assert_eq!(fs::read(&foreign).expect("still there"), b"not ours");
    check_equal(&disk, &records);
}

/// Records that could not be read for a while, when their namespace was cleared, do not come back by a restart.
#[test]
fn what_could_not_be_read_is_cleared_too() {
    let scratch = Scratch::new();
    let disk = open(&scratch);
    let records = documents(3);
    put(&disk, &records.iter().collect::<Vec<_>>());
    let file = scratch.files().pop().expect("open");
    let whole = fs::read(&file).expect("readable");
    let write = |bytes: &[u8]| {
        let handle = OpenOptions::new().write(true).open(&file).expect("there");
        handle.write_all_at(bytes, 4096).expect("writable");
    };
    write(&vec![0; whole.len() - 4096]);
    let keys: Vec<Key> = records.iter().map(|made| made.key).collect();
    assert!(get(&disk, &keys).iter().all(Option::is_none));
    write(&whole[4096..]);
    disk.clear(Some(&namespace(0).name()));
    crash(disk);
    assert!(get(&open(&scratch), &keys).iter().all(Option::is_none));
}

/// Case f05: segment files that change their names while the store is away hold nothing.
#[test]
fn case_f05_exchanged_files_are_not_believed() {
    let scratch = Scratch::new();
    let disk = open(&scratch);
    let records = documents(60);
    put(&disk, &records.iter().collect::<Vec<_>>());
    drop(disk);
    let files = scratch.files();
    let aside = scratch.0.join("aside");
    fs::rename(&files[0], &aside).expect("there");
    fs::rename(&files[1], &files[0]).expect("there");
    fs::rename(&aside, &files[1]).expect("there");
    let disk = open(&scratch);
    let keys: Vec<Key> = records.iter().map(|made| made.key).collect();
    for (found, made) in get(&disk, &keys).into_iter().zip(&records) {
        assert!(found.is_none_or(|found| found == *made));
    }
    assert_eq!(disk.stats().bytes_used, scratch.bytes());
}

/// Case f04: whatever part of a segment's writes reached the file, every record is whole or absent after a restart, and those
/// that were whole in the image are there.
#[test]
fn case_f04_crash_images_of_an_open_segment() {
    let scratch = Scratch::new();
    let disk = open(&scratch);
    let records: Vec<Made> = (0..9)
        .map(|seed| made(0, seed, 1, 1000 + 2500 * seed, 1, Codec::RAW))
        .collect();
    put(&disk, &records.iter().collect::<Vec<_>>());
    let ends: Vec<u64> = records
        .iter()
        .map(|made| disk.logs[0].place(&made.key).expect("there").entry)
        .map(|e| e.offset + e.bytes())
        .collect();
    let starts: Vec<u64> = records
        .iter()
        .map(|made| disk.logs[0].place(&made.key).expect("there").entry.offset)
        .collect();
    crash(disk);
    let file = scratch.files().remove(0);
    let whole = fs::read(&file).expect("there");
    let last = *ends.iter().max().expect("some") as usize;
    let check = |image: &[u8], kept: &dyn Fn(u64, u64) -> bool, what: &str| {
        fs::write(&file, image).expect("writable");
        let disk = open(&scratch);
        for (number, made) in records.iter().enumerate() {
            let found = get(&disk, &[made.key]).remove(0);
            let expected = kept(starts[number], ends[number]).then(|| made.clone());
            assert_eq!(found, expected, "{what}, record {number}");
        }
        assert_eq!(disk.stats().bytes_used, scratch.bytes(), "{what}");
        drop(disk);
        // Sealed now: the next start finds the same.
        let disk = open(&scratch);
        assert_eq!(disk.stats().errors.len(), 0);
        for (number, made) in records.iter().enumerate() {
            assert_eq!(
                disk.contains(&[made.key])[0] != 0,
                kept(starts[number], ends[number]),
                "{what}, again"
            );
        }
        drop(disk);
        for file in scratch.files() {
            fs::remove_file(file).expect("there");
        }
    };
    for cut in (0..=last).step_by(512) {
        let mut image = whole[..cut].to_vec();
        let kept = |_, end: u64| cut > 4096 && end as usize <= cut.next_multiple_of(512);
        // The last record's padding is zeros, as is what the cut took: it may be whole without it.
        let padding = |start: u64, end: u64| {
            kept(start, end)
                || (cut >= 4096
                    && whole[cut..].len() >= end as usize - cut.min(end as usize)
                    && cut < end as usize
                    && cut > start as usize
                    && whole[cut..end as usize].iter().all(|&byte| byte == 0))
        };
        image.resize(whole.len(), 0);
        check(&image, &padding, &format!("cut at {cut}"));
    }
    for torn in 0..records.len() {
        let mut image = whole.clone();
        image[starts[torn] as usize + 4096] ^= 1;
        let kept = |start, _| start != starts[torn];
        check(&image, &kept, &format!("record {torn} torn"));
    }
}

/// Case f04: a footer that is cut anywhere is as good as none.
#[test]
fn case_f04_crash_images_of_a_footer() {
    let scratch = Scratch::new();
    let disk = open(&scratch);
    let records: Vec<Made> = (0..60)
        .map(|seed| made(0, seed, 1, 100, 1, Codec::RAW))
        .collect();
    put(&disk, &records.iter().collect::<Vec<_>>());
    drop(disk);
    let file = scratch.files().remove(0);
    let whole = fs::read(&file).expect("there");
    let start = whole.len() - format::footer_len(60) as usize;
    for cut in (start..whole.len()).step_by(512) {
        fs::write(&file, &whole[..cut]).expect("writable");
        let disk = open(&scratch);
        check_equal(&disk, &records);
        drop(disk);
        assert_eq!(
            fs::read(&file).expect("there").len(),
            whole.len(),
            "sealed again"
        );
    }
}

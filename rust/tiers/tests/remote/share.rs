//! A shared directory: what lies there, who may read it, and what becomes of files that others have changed.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::records::{Record, assert_all, hits, keys, put, record, records, tenant};
use crate::{errors, open};

fn file_of(directory: &Path, record: &Record) -> PathBuf {
    let digits: String = record
        .key
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    directory.join(&digits[..2]).join(format!("{digits}.blend"))
}

#[test]
fn records_go_and_come_back_between_two_openers() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("kv/deep");
    let url = format!("file://{}", root.display());
    let (one, two) = (open(&url), open(&url));
    let ours = records(&tenant("ours"), 20, 10_000);
    assert_eq!(hits(&*two, &ours), [false; 20]);
    assert_eq!(put(&*one, &ours), 20);
    assert_eq!(put(&*two, &ours), 20, "over what is there");
    assert_all(&*two, &ours);
    assert_eq!(two.contains(&keys(&ours)), [1; 20]);
    two.remove(&keys(&ours[..3]));
    assert_eq!(
        hits(&*one, &ours),
        [vec![false; 3], vec![true; 17]].concat()
    );
    for path in [&root, file_of(&root, &ours[5]).parent().unwrap()] {
        assert_eq!(
            fs::metadata(path).unwrap().permissions().mode() & 0o777,
            0o700,
            "{path:?}"
        );
    }
    assert_eq!(
        fs::metadata(file_of(&root, &ours[5]))
            .unwrap()
            .permissions()
            .mode()
            & 0o777,
        0o600
    );
    assert!(one.stats().errors.is_empty() && two.stats().errors.is_empty());
}

#[test]
fn case_f05_changed_files_are_misses() {
    let directory = tempfile::tempdir().unwrap();
    let tier = open(&format!("file://{}", directory.path().display()));
    let ours = records(&tenant("ours"), 8, 2_000);
    put(&*tier, &ours);
    let file = |index: usize| file_of(directory.path(), &ours[index]);
    let change = |index: usize, how: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = fs::read(file(index)).unwrap();
        how(&mut bytes);
        fs::write(file(index), bytes).unwrap();
    };
    fs::remove_file(file(0)).unwrap();
    change(1, &|bytes| bytes.truncate(700));
    change(2, &|bytes| *bytes.last_mut().unwrap() ^= 1);
    fs::copy(file(7), file(3)).unwrap();
    fs::remove_file(file(4)).unwrap();
    symlink(file(7), file(4)).unwrap();
    fs::remove_file(file(5)).unwrap();
    let pipe = std::ffi::CString::new(file(5).to_str().unwrap()).unwrap();
    // SAFETY: a path that ends with a zero byte.
    assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
    for index in [0, 1, 2, 3, 4, 5] {
        let before: u64 = tier.stats().errors.values().sum();
        assert_eq!(hits(&*tier, &ours[index..=index]), [false], "file {index}");
        // Counted, but for the one that is simply not there; the share itself is fine.
        assert_eq!(
            tier.stats().errors.values().sum::<u64>() - before,
            u64::from(index != 0),
            "{:?}",
            tier.stats()
        );
        assert_all(&*tier, &ours[6..]);
    }
    assert_eq!(errors(&*tier, "off"), 0);
}

#[test]
fn clearing_and_sweeping() {
    let directory = tempfile::tempdir().unwrap();
    let tier = open(&format!("file://{}", directory.path().display()));
    let (ours, theirs) = (
        records(&tenant("ours"), 9, 100),
        records(&tenant("theirs"), 9, 100),
    );
    put(&*tier, &ours);
    put(&*tier, &theirs);
    let alien = directory.path().join("ab/notes.txt");
    let inside = file_of(directory.path(), &ours[0]).with_extension("part");
    fs::create_dir_all(alien.parent().unwrap()).unwrap();
    for path in [&alien, &inside] {
        fs::write(path, "of somebody").unwrap();
    }
    tier.clear(Some(&tenant("ours").name()));
    assert_eq!(hits(&*tier, &ours), [false; 9]);
    assert_all(&*tier, &theirs);
    assert!(
        inside.exists(),
        "a fresh unfinished file may still be written"
    );
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(7_200);
    fs::File::options()
        .write(true)
        .open(&inside)
        .unwrap()
        .set_modified(old)
        .unwrap();
    tier.clear(None);
    assert_eq!(hits(&*tier, &theirs), [false; 9]);
    assert!(
        !inside.exists() && alien.exists(),
        "an old one is swept, what is not ours stays"
    );
}

#[test]
fn a_share_that_goes_away_is_left_alone_and_found_again() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("kv");
    let tier = open(&format!("file://{}", root.display()));
    let one = [record(&tenant("ours"), 1, 100)];
    fs::rename(&root, directory.path().join("gone")).unwrap();
    // A file where the directory was: nothing can be made there.
    fs::write(&root, "").unwrap();
    for _ in 0..5 {
        assert_eq!((put(&*tier, &one), hits(&*tier, &one)), (0, vec![false]));
    }
    assert_eq!(errors(&*tier, "off"), 1, "{:?}", tier.stats());
    fs::remove_file(&root).unwrap();
    crate::servers::eventually("it comes back", || put(&*tier, &one) == 1);
    assert_all(&*tier, &one);
}

#[test]
fn a_directory_that_cannot_be_made_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let error =
        blendstore_tiers::remote::open(&format!("file://{}/kv", file.display()), crate::PATIENT)
            .unwrap_err();
    assert!(
        error.contains(file.to_str().unwrap()) && error.contains("can be written"),
        "{error}"
    );
}

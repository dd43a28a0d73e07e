//! An S3-compatible server, once with every signature checked, and whom the client talks to.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use blendstore_tiers::remote;

use crate::records::{assert_all, hits, keys, put, record, records, tenant};
use crate::servers::{Mischief, Proxy, eventually, free_port, program};
use crate::{errors, open};

/// What the tests' user may do: everything with objects, as the server's policies say it.
const POLICY: &str = "%7B%22Version%22%3A%222012-10-17%22%2C%22Statement%22%3A%5B%7B%22Effect%22%3A%22Allow%22%2C\
     %22Action%22%3A%22s3%3A%2A%22%2C%22Resource%22%3A%22%2A%22%7D%5D%7D";

/// A signature that an open server takes for anybody's who may change what is there.
const SOMEBODY: &str = "Authorization: AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/aws4_request, \
     SignedHeaders=host, Signature=x\r\n";

struct Server {
    child: Child,
    port: u16,
    /// Id and secret, percent-encoded.
    key: String,
}

impl Server {
    /// Asks nobody who he is.
    fn open() -> Self {
        let port = free_port();
        let server = Self {
            child: spawn(port, None),
            port,
            key: "id:secret".into(),
        };
        assert!(server.say("PUT", "/bucket", "", b"").contains("200"));
        server
    }

    /// Checks the signature of every request after those that make its user.
    fn guarded() -> Self {
        let port = free_port();
        let mut server = Self {
            child: spawn(port, Some("4")),
            port,
            key: String::new(),
        };
        // Of no meaning but that of naming the service.
        let service = "Authorization: AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/iam/aws4_request, \
             SignedHeaders=host, Signature=x\r\nContent-Type: application/x-www-form-urlencoded\r\n";
        let ask = |action: &str| {
            server.say(
                "POST",
                "/",
                service,
                format!("Version=2010-05-08&{action}").as_bytes(),
            )
        };
        assert!(ask("Action=CreateUser&UserName=tester").contains("200"));
        let made = ask("Action=CreateAccessKey&UserName=tester");
        assert!(
            ask(&format!(
                "Action=PutUserPolicy&UserName=tester&PolicyName=all&PolicyDocument={POLICY}"
            ))
            .contains("200")
        );
        assert!(server.say("PUT", "/bucket", "", b"").contains("200"));
        let part = |name: &str| {
            let (_, rest) = made
                .split_once(&format!("<{name}>"))
                .expect("an access key");
            rest.split_once('<').expect("its end").0.to_string()
        };
        let secret = part("SecretAccessKey")
            .replace('/', "%2F")
            .replace('+', "%2B");
        server.key = format!("{}:{secret}", part("AccessKeyId"));
        server
    }

    fn url(&self, port: u16) -> String {
        format!(
            "s3://{}@bucket/team/a?endpoint=http://127.0.0.1:{port}",
            self.key
        )
    }

    /// One request without a signature, and all of the answer.
    fn say(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
            self.port,
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The same again, empty.
    fn restart(&mut self) {
        self.child = spawn(self.port, None);
        assert!(self.say("PUT", "/bucket", "", b"").contains("200"));
    }
}

/// `free` requests are not checked, all others are; without it none is.
fn spawn(port: u16, free: Option<&str>) -> Child {
    let mut command = Command::new(program("s3-server"));
    command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
    command.envs(free.map(|count| ("INITIAL_NO_AUTH_ACTION_COUNT", count)));
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    eventually("the server answers", || {
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    child
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn records_go_and_come_back() {
    let server = Server::guarded();
    let tier = open(&server.url(server.port));
    let ours = [
        records(&tenant("ours"), 12, 5_000),
        vec![record(&tenant("ours"), 50, 3 << 20)],
    ]
    .concat();
    assert_eq!(tier.contains(&keys(&ours)), [0; 13]);
    assert_eq!(hits(&*tier, &ours), [false; 13]);
    assert_eq!(put(&*tier, &ours), 13);
    assert_all(&*tier, &ours);
    assert_eq!(tier.contains(&keys(&ours)), [1; 13]);
    assert_all(&*open(&server.url(server.port)), &ours);
    tier.remove(&keys(&ours[..2]));
    tier.remove(&keys(&ours[..2]));
    assert_eq!(
        hits(&*tier, &ours),
        [vec![false; 2], vec![true; 11]].concat()
    );
    let theirs = records(&tenant("theirs"), 4, 100);
    assert_eq!(put(&*tier, &theirs), 4);
    tier.clear(Some(&tenant("ours").name()));
    assert_eq!(hits(&*tier, &ours), [false; 13]);
    assert_all(&*tier, &theirs);
    assert!(tier.stats().errors.is_empty(), "{:?}", tier.stats());
}

#[test]
fn wrong_keys_and_missing_files_are_told() {
    let server = Server::guarded();
    let one = records(&tenant("ours"), 1, 10);
    let (id, _) = server.key.split_once(':').unwrap();
    let tier = open(
        &server
            .url(server.port)
            .replace(&server.key, &format!("{id}:wrong")),
    );
    assert_eq!(put(&*tier, &one), 0);
    assert_eq!(errors(&*tier, "login"), 1, "{:?}", tier.stats());
    let tier = open("s3://bucket?credentials=anonymous&endpoint=http://127.0.0.1:1");
    assert_eq!(put(&*tier, &one), 0);
    let url = "s3://bucket?credentials=anonymous&endpoint=https://127.0.0.1:1&ca=/nowhere";
    let error = remote::open(url, crate::PATIENT).unwrap_err();
    assert!(error.contains("option ca"), "{error}");
}

#[test]
fn case_f05_a_changed_object_is_a_miss() {
    let server = Server::open();
    let tier = open(&server.url(server.port));
    let ours = records(&tenant("ours"), 3, 2_000);
    put(&*tier, &ours);
    let digits: String = ours[0]
        .key
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let path = format!("/bucket/team/a/blendstore/1/{}/{digits}", &digits[..2]);
    for value in [
        vec![],
        b"\x80\x04pickle".to_vec(),
        ours[0].bytes[..900].to_vec(),
        ours[1].bytes.clone(),
    ] {
        assert!(server.say("PUT", &path, SOMEBODY, &value).contains("200"));
        let before: u64 = tier.stats().errors.values().sum();
        assert_eq!(hits(&*tier, &ours), [false, true, true]);
        assert_eq!(
            tier.stats().errors.values().sum::<u64>(),
            before + 1,
            "{:?}",
            tier.stats()
        );
    }
}

#[test]
fn case_f08_an_object_store_that_stalls_or_goes_away_is_left_alone_and_found_again() {
    let mut server = Server::open();
    let ours = records(&tenant("ours"), 2, 300_000);
    assert_eq!(put(&*open(&server.url(server.port)), &ours), 2);
    let proxy = Proxy::before(server.port);
    let tier = remote::open(&server.url(proxy.port), Duration::from_millis(500)).unwrap();
    for mischief in [
        Mischief::Cut(100_000),
        Mischief::Stall(100_000),
        Mischief::Trickle(1_000),
        Mischief::Refuse,
    ] {
        proxy.set(mischief);
        let since = Instant::now();
        assert!(hits(&*tier, &ours).contains(&false), "{mischief:?}");
        assert!(
            since.elapsed() < Duration::from_secs(8),
            "{mischief:?}: {:?}",
            since.elapsed()
        );
        proxy.set(Mischief::None);
        eventually("it comes back", || hits(&*tier, &ours) == [true, true]);
    }
    server.kill();
    for _ in 0..4 {
        assert_eq!(hits(&*tier, &ours), [false, false]);
    }
    assert_eq!(errors(&*tier, "off"), 1, "{:?}", tier.stats());
    server.restart();
    eventually("it comes back", || put(&*tier, &ours) == 2);
    assert_all(&*tier, &ours);
}

/// Counts who connects, and sends them on to another.
fn redirecting(to: u16) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, count) = (
        listener.local_addr().unwrap().port(),
        Arc::new(AtomicUsize::new(0)),
    );
    let counted = count.clone();
    std::thread::spawn(move || {
        for client in listener.incoming().take(64) {
            let mut client = client.unwrap();
            counted.fetch_add(1, SeqCst);
            let _ = client.set_read_timeout(Some(Duration::from_secs(5)));
            let _ = client.read(&mut [0; 8192]);
            let _ = client.write_all(
                format!("HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:{to}/x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    .as_bytes(),
            );
        }
    });
    (port, count)
}

#[test]
fn case_o05_an_object_store_that_sends_us_elsewhere_is_not_followed() {
    let (elsewhere, visits) = redirecting(1);
    let (endpoint, asked) = redirecting(elsewhere);
    let url = format!("s3://id:secret@bucket?endpoint=http://127.0.0.1:{endpoint}");
    let tier = remote::open(&url, Duration::from_secs(5)).unwrap();
    let one = records(&tenant("ours"), 1, 10);
    assert_eq!((put(&*tier, &one), hits(&*tier, &one)), (0, vec![false]));
    assert!(asked.load(SeqCst) > 0);
    assert_eq!(visits.load(SeqCst), 0);
}

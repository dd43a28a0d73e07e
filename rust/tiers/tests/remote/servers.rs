//! Real servers on free ports, ended with the test that started them, and a proxy that breaks connections on purpose.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// A server that `make services` put there.
pub fn program(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../.services/bin")
        .join(name);
    assert!(
        path.exists(),
        "{} is missing: run `make services`",
        path.display()
    );
    path
}

pub fn free_port() -> u16 {
    // Below the range of outgoing connections, and with room for a cluster's second port 10,000 above.
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let start = std::process::id() as usize * 37 % 8_000;
    loop {
        let port = (12_000 + (start + NEXT.fetch_add(1, SeqCst)) % 8_000) as u16;
        let both = [port, port + 10_000].map(|port| TcpListener::bind(("127.0.0.1", port)));
        if both.iter().all(Result::is_ok) {
            return port;
        }
    }
}

/// Waits for something that happens by itself; far beyond any pause of the tier.
pub fn eventually(what: &str, mut happens: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !happens() {
        assert!(Instant::now() < end, "{what}: not within a minute");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// One Redis or Valkey, or a Sentinel.
pub struct Server {
    child: Child,
    program: String,
    arguments: Vec<String>,
    pub port: u16,
    pub directory: TempDir,
}

impl Server {
    /// `redis-server` or `valkey-server` with arguments behind those that every test needs.
    pub fn start(program: &str, arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let port = free_port();
        let dir = directory.path().to_str().unwrap();
        let port_text = port.to_string();
        let mut all = vec!["--port", &port_text, "--bind", "127.0.0.1", "--dir", dir];
        all.extend([
            "--save",
            "",
            "--appendonly",
            "no",
            "--enable-debug-command",
            "local",
        ]);
        all.extend(arguments);
        let all: Vec<String> = all.iter().map(|text| text.replace("DIR", dir)).collect();
        let child = spawn(program, &all);
        let server = Self {
            child,
            program: program.into(),
            arguments: all,
            port,
            directory,
        };
        server.wait();
        server
    }

    /// A Sentinel that watches `master`.
    pub fn sentinel(master: u16) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let port = free_port();
        let file = directory.path().join("sentinel.conf");
        let lines = [
            format!("port {port}\nbind 127.0.0.1\ndir {}", directory.path().display()),
            format!("sentinel monitor records 127.0.0.1 {master} 1"),
            "sentinel down-after-milliseconds records 500\nsentinel failover-timeout records 2000\n".into(),
        ];
        std::fs::write(&file, lines.join("\n")).unwrap();
        let arguments = vec![file.to_str().unwrap().to_string(), "--sentinel".into()];
        let child = spawn("redis-server", &arguments);
        let server = Self {
            child,
            program: "redis-server".into(),
            arguments,
            port,
            directory,
        };
        server.wait();
        server
    }

    fn wait(&self) {
        eventually("the server answers", || {
            TcpStream::connect(("127.0.0.1", self.port)).is_ok()
                || self.arguments.iter().any(|text| text == "--tls-port")
        });
        if self
            .arguments
            .iter()
            .all(|text| text != "--requirepass" && text != "--tls-port")
        {
            eventually("the server is ready", || self.say(&["PING"]) == "PONG");
        }
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The same again, on the same port, empty.
    pub fn restart(&mut self) {
        self.child = spawn(&self.program, &self.arguments);
        self.wait();
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: our own child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// One command; errors and numbers as text, arrays as their items in lines, nothing as "(nil)".
    pub fn say(&self, parts: &[&str]) -> String {
        self.say_bytes(&parts.iter().map(|part| part.as_bytes()).collect::<Vec<_>>())
    }

    pub fn say_bytes(&self, parts: &[&[u8]]) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let mut command = format!("*{}\r\n", parts.len()).into_bytes();
        for part in parts {
            command.extend(format!("${}\r\n", part.len()).bytes());
            command.extend_from_slice(part);
            command.extend_from_slice(b"\r\n");
        }
        stream.write_all(&command).unwrap();
        answer(&mut BufReader::new(stream))
    }
}

fn answer(stream: &mut impl BufRead) -> String {
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    let line = line.trim_end();
    match line.split_at(line.len().min(1)) {
        ("$" | "*", "-1") => "(nil)".into(),
        ("$", length) => {
            let mut text = vec![0; length.parse::<usize>().unwrap() + 2];
            stream.read_exact(&mut text).unwrap();
            String::from_utf8_lossy(&text[..text.len() - 2]).into_owned()
        }
        ("*", count) => {
            let items: Vec<_> = (0..count.parse::<usize>().unwrap())
                .map(|_| answer(stream))
                .collect();
            items.join("\n")
        }
        (_, rest) => rest.to_string(),
    }
}

fn spawn(name: &str, arguments: &[String]) -> Child {
    Command::new(program(name))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Three masters that share the slots.
pub fn cluster() -> [Server; 3] {
    let nodes = [0, 1, 2].map(|_| {
        Server::start(
            "redis-server",
            &["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"],
        )
    });
    for (index, node) in nodes.iter().enumerate() {
        let [first, last] =
            [[0, 5460], [5461, 10922], [10923, 16383]][index].map(|slot: u16| slot.to_string());
        assert_eq!(node.say(&["CLUSTER", "ADDSLOTSRANGE", &first, &last]), "OK");
        if index > 0 {
            assert_eq!(
                nodes[0].say(&["CLUSTER", "MEET", "127.0.0.1", &node.port.to_string()]),
                "OK"
            );
        }
    }
    eventually("the cluster is whole", || {
        nodes.iter().all(|node| {
            let info = node.say(&["CLUSTER", "INFO"]);
            info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3")
        })
    });
    nodes
}

/// What a proxy does to what the server answers on connections made from now on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mischief {
    /// Nothing.
    None,
    /// Closes both sides after so many bytes.
    Cut(usize),
    /// Says nothing more after so many bytes, and keeps the connection open.
    Stall(usize),
    /// A byte now and then after so many.
    Trickle(usize),
    /// Closes at once.
    Refuse,
    /// Flips a bit of that byte.
    Flip(usize),
}

/// Stands between the tier and a server.
pub struct Proxy {
    pub port: u16,
    mischief: Arc<std::sync::Mutex<Mischief>>,
    ended: Arc<AtomicBool>,
    pub connections: Arc<AtomicUsize>,
}

impl Proxy {
    pub fn before(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Self {
            port: listener.local_addr().unwrap().port(),
            mischief: Arc::new(std::sync::Mutex::new(Mischief::None)),
            ended: Arc::default(),
            connections: Arc::default(),
        };
        let (mischief, ended, connections) = (
            proxy.mischief.clone(),
            proxy.ended.clone(),
            proxy.connections.clone(),
        );
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if ended.load(SeqCst) {
                    return;
                }
                connections.fetch_add(1, SeqCst);
                let (client, how) = (client.unwrap(), *mischief.lock().unwrap());
                if how == Mischief::Refuse {
                    continue;
                }
                let Ok(server) = TcpStream::connect(("127.0.0.1", target)) else {
                    continue;
                };
                let (mut up_from, mut up_to) =
                    (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut up_from, &mut up_to);
                    let _ = up_to.shutdown(std::net::Shutdown::Write);
                });
                let ended = ended.clone();
                std::thread::spawn(move || answer_with(how, server, client, &ended));
            }
        });
        proxy
    }

    /// From the next connection on.
    pub fn set(&self, mischief: Mischief) {
        *self.mischief.lock().unwrap() = mischief;
    }
}

fn answer_with(how: Mischief, mut server: TcpStream, mut client: TcpStream, ended: &AtomicBool) {
    let mut passed = 0;
    let mut buffer = vec![0; 1 << 16];
    while let Ok(read @ 1..) = server.read(&mut buffer) {
        let bytes = &mut buffer[..read];
        let until = |limit: usize| limit.saturating_sub(passed).min(read);
        match how {
            Mischief::Cut(limit) if passed + read > limit => {
                let _ = client.write_all(&bytes[..until(limit)]);
                let _ = client.shutdown(std::net::Shutdown::Both);
                let _ = server.shutdown(std::net::Shutdown::Both);
                return;
            }
            Mischief::Stall(limit) | Mischief::Trickle(limit) if passed + read > limit => {
                let _ = client.write_all(&bytes[..until(limit)]);
                for byte in &bytes[until(limit)..] {
                    if ended.load(SeqCst) {
                        return;
                    }
                    if how == Mischief::Trickle(limit) && client.write_all(&[*byte]).is_err() {
                        return;
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
                return;
            }
            Mischief::Flip(at) if (passed..passed + read).contains(&at) => {
                bytes[at - passed] ^= 0x10
            }
            _ => {}
        }
        if client.write_all(bytes).is_err() {
            return;
        }
        passed += read;
    }
    let _ = client.shutdown(std::net::Shutdown::Write);
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.ended.store(true, SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

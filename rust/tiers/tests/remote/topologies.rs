//! One server, TLS, sockets, clusters, sentinels: records go there and come back, and topologies that change are followed.

use std::process::{Command, Stdio};

use blendstore_tiers::Tier;
use blendstore_tiers::remote;

use crate::records::{assert_all, get, get_without_room, hits, keys, put, record, records, tenant};
use crate::servers::{Server, cluster, eventually};
use crate::{PATIENT, errors, open};

/// Everything that a tier does, once.
fn exercise(tier: &dyn Tier) {
    let ours = tenant("ours");
    let stored = [
        records(&ours, 20, 5_000),
        vec![record(&ours, 100, 1), record(&ours, 101, 3 << 20)],
    ]
    .concat();
    let missing = record(&ours, 102, 10);
    assert_eq!(tier.contains(&keys(&stored)), vec![0; 22]);
    assert_eq!(hits(tier, &stored), vec![false; 22]);
    assert_eq!(put(tier, &stored), 22, "{:?}", tier.stats());
    assert_all(tier, &stored);
    let asked = [keys(&stored), vec![missing.key]].concat();
    assert_eq!(tier.contains(&asked), [vec![1; 22], vec![0]].concat());
    assert!(get_without_room(tier, &asked).frames.is_empty());
    assert_all(tier, &stored);
    tier.remove(&[stored[3].key, missing.key]);
    assert_eq!(
        hits(tier, &stored),
        (0..22).map(|index| index != 3).collect::<Vec<_>>()
    );
    let stats = tier.stats();
    assert_eq!((stats.puts, stats.dropped), (22, 0));
    assert_eq!(
        (stats.gets, stats.hits),
        (22 + 22 + 23 + 22 + 22, 22 + 22 + 21)
    );
    assert_eq!(stats.gets, stats.hits + stats.misses);
    assert_eq!(
        stats.bytes_written,
        stored
            .iter()
            .map(|record| record.bytes.len() as u64)
            .sum::<u64>()
    );
    assert!(stats.errors.is_empty(), "{:?}", stats.errors);
}

#[test]
fn redis_and_valkey() {
    for program in ["redis-server", "valkey-server"] {
        let server = Server::start(program, &[]);
        exercise(&*open(&format!("redis://127.0.0.1:{}", server.port)));
        exercise(&*open(&format!(
            "valkey://localhost:{}/5?prefix=a:b",
            server.port
        )));
        assert_eq!(
            server.say(&["DBSIZE"]),
            "21",
            "the other database has the other records"
        );
    }
}

#[test]
fn passwords_users_and_sockets() {
    let arguments = ["--requirepass", "p@s/s", "--unixsocket", "DIR/redis.sock"];
    let server = Server::start("redis-server", &arguments);
    exercise(&*open(&format!(
        "redis://:p%40s%2Fs@127.0.0.1:{}",
        server.port
    )));
    let user = open(&format!(
        "redis://default:p%40s%2Fs@127.0.0.1:{}/1",
        server.port
    ));
    exercise(&*user);
    let path = server.directory.path().join("redis.sock");
    exercise(&*open(&format!(
        "unix://:p%40s%2Fs@{}?db=2",
        path.display()
    )));
    for wrong in ["redis://:other", "redis://nobody:p%40s%2Fs"] {
        let tier = open(&format!("{wrong}@127.0.0.1:{}", server.port));
        assert_eq!(
            hits(&*tier, &records(&tenant("ours"), 2, 10)),
            [false, false]
        );
        assert_eq!(errors(&*tier, "login"), 1, "{:?}", tier.stats());
    }
    let none = open(&format!("redis://127.0.0.1:{}", server.port));
    assert_eq!(put(&*none, &records(&tenant("ours"), 1, 10)), 0);
    assert_eq!(errors(&*none, "refused"), 1, "{:?}", none.stats());
}

#[test]
fn tls_proves_who_answers() {
    let file = |name: &str| format!("{}/tests/remote/tls/{name}", env!("CARGO_MANIFEST_DIR"));
    let port = crate::servers::free_port();
    let port_text = port.to_string();
    let (cert, key, ca) = (file("server.pem"), file("server.key"), file("ca.pem"));
    let _server = Server::start(
        "redis-server",
        &[
            "--tls-port",
            &port_text,
            "--tls-cert-file",
            &cert,
            "--tls-key-file",
            &key,
            "--tls-ca-cert-file",
            &ca,
        ],
    );
    let identity = format!("cert={}&key={}", file("client.pem"), file("client.key"));
    let ours = format!("rediss://127.0.0.1:{port}?ca={ca}&{identity}");
    eventually("the server answers", || {
        std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    exercise(&*open(&ours));
    exercise(&*open(
        &ours.replace("127.0.0.1", "localhost").replace('?', "/1?"),
    ));
    // The system's authorities don't know this one; the server asks for a certificate; plain text is no TLS.
    let tier = open(&format!("rediss://127.0.0.1:{port}?{identity}"));
    let few = records(&tenant("ours"), 1, 10);
    assert_eq!(put(&*tier, &few), 0);
    let tier = open(&format!("rediss://127.0.0.1:{port}?ca={ca}"));
    assert_eq!(put(&*tier, &few), 0);
    let tier = open(&format!("redis://127.0.0.1:{port}"));
    assert_eq!(put(&*tier, &few), 0);
    for (text, says) in [
        (
            format!("rediss://h?ca={}", file("server.key")),
            "no certificate",
        ),
        (format!("rediss://h?ca={}", file("missing")), "option ca"),
        (
            format!("rediss://:secret@h?ca={ca}&cert={ca}&key={ca}"),
            "option key",
        ),
    ] {
        let error = remote::open(&text, PATIENT).unwrap_err();
        assert!(error.contains(says) && !error.contains("secret"), "{error}");
    }
}

#[test]
fn a_cluster_of_three_that_moves_a_slot() {
    let nodes = cluster();
    let url = format!(
        "redis-cluster://127.0.0.1:{},127.0.0.1:{}",
        nodes[0].port, nodes[1].port
    );
    exercise(&*open(&url));
    let tier = open(&url.replace("redis-cluster", "redis"));
    let ours = records(&tenant("many"), 60, 200);
    assert_eq!(put(&*tier, &ours), 60);
    for node in &nodes {
        assert_ne!(node.say(&["DBSIZE"]), "0", "every node has some");
    }
    // One slot, from the first node to the second, first half way.
    let in_first = |key: &str| {
        nodes[0]
            .say(&["CLUSTER", "KEYSLOT", key])
            .parse::<u16>()
            .unwrap()
            <= 5460
    };
    let moving = nodes[0]
        .say(&["KEYS", "*"])
        .lines()
        .find(|key| in_first(key))
        .unwrap()
        .to_string();
    let slot = nodes[0].say(&["CLUSTER", "KEYSLOT", &moving]);
    let [from, to] = [&nodes[0], &nodes[1]].map(|node| node.say(&["CLUSTER", "MYID"]));
    assert_eq!(
        nodes[1].say(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from]),
        "OK"
    );
    assert_eq!(
        nodes[0].say(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to]),
        "OK"
    );
    let port = nodes[1].port.to_string();
    let all = nodes[0].say(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
    for key in all.lines() {
        assert_eq!(
            nodes[0].say(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]),
            "OK"
        );
    }
    assert_all(&*tier, &ours);
    for node in [&nodes[1], &nodes[0], &nodes[2]] {
        assert_eq!(node.say(&["CLUSTER", "SETSLOT", &slot, "NODE", &to]), "OK");
    }
    assert_all(&*tier, &ours);
    assert_eq!(put(&*tier, &ours), 60);
    assert_all(&*tier, &ours);
    assert!(
        tier.stats().errors.is_empty(),
        "a moved slot is no error: {:?}",
        tier.stats()
    );
    tier.clear(None);
    assert_eq!(
        nodes
            .iter()
            .map(|node| node.say(&["DBSIZE"]))
            .collect::<Vec<_>>(),
        ["0", "0", "0"]
    );
}

#[test]
fn case_f08_a_lost_node_costs_its_own_records_only() {
    let mut nodes = cluster();
    let tier = open(&format!("redis-cluster://127.0.0.1:{}", nodes[0].port));
    let ours = records(&tenant("many"), 60, 200);
    assert_eq!(put(&*tier, &ours), 60);
    for node in &nodes {
        // Otherwise a cluster without one of its nodes serves nothing at all.
        assert_eq!(
            node.say(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]),
            "OK"
        );
    }
    let lost: usize = nodes[2].say(&["DBSIZE"]).parse().unwrap();
    nodes[2].kill();
    eventually("the others serve on", || {
        hits(&*tier, &ours).iter().filter(|hit| **hit).count() == 60 - lost
    });
    for _ in 0..20 {
        hits(&*tier, &ours);
    }
    assert!(
        hits(&*tier, &ours).iter().filter(|hit| **hit).count() == 60 - lost,
        "the others are never left alone"
    );
}

#[test]
fn sentinels_name_the_master_and_its_successor() {
    let mut master = Server::start("redis-server", &[]);
    let port = master.port.to_string();
    let replica = Server::start("redis-server", &["--replicaof", "127.0.0.1", &port]);
    eventually("the replica follows", || {
        replica
            .say(&["INFO", "replication"])
            .contains("master_link_status:up")
    });
    let sentinel = Server::sentinel(master.port);
    let known = |what: &str| {
        sentinel
            .say(&["SENTINEL", "master", "records"])
            .contains(what)
    };
    eventually("the sentinel knows the replica", || known("num-slaves\n1"));
    let url = format!(
        "redis-sentinel://127.0.0.1:1,127.0.0.1:{}/records",
        sentinel.port
    );
    let tier = open(&url);
    exercise(&*tier);
    let before = records(&tenant("before"), 5, 300);
    assert_eq!(put(&*tier, &before), 5);
    eventually("the replica has all", || {
        master.say(&["WAIT", "1", "1000"]).trim() == "1"
    });
    master.kill();
    let after = records(&tenant("after"), 5, 300);
    eventually("the successor takes over", || put(&*tier, &after) == 5);
    // The first answers after a change of masters may be misses.
    eventually("what was put before is read from it", || {
        hits(&*tier, &before) == vec![true; before.len()]
    });
    assert_all(&*tier, &after);
    assert_eq!(replica.say(&["DBSIZE"]), (21 + 10).to_string());
    let unknown = open(&url.replace("records", "others"));
    assert_eq!(put(&*unknown, &before), 0);
    assert!(errors(&*unknown, "refused") > 0, "{:?}", unknown.stats());
}

#[test]
fn records_live_as_long_as_ttl_says() {
    let server = Server::start("redis-server", &[]);
    let tier = open(&format!(
        "redis://127.0.0.1:{}?ttl=100&prefix=p",
        server.port
    ));
    let one = record(&tenant("ours"), 1, 10);
    assert_eq!(put(&*tier, std::slice::from_ref(&one)), 1);
    let name: String = one.key.iter().map(|byte| format!("{byte:02x}")).collect();
    let left: u64 = server
        .say(&["PTTL", &format!("p:blendstore:1:{name}")])
        .parse()
        .unwrap();
    assert!((1..=100_000).contains(&left), "{left} ms");
}

#[test]
fn clearing_drops_one_namespace_and_nothing_of_others() {
    let server = Server::start("valkey-server", &[]);
    let tier = open(&format!("redis://127.0.0.1:{}", server.port));
    let (ours, theirs) = (
        records(&tenant("ours"), 700, 50),
        records(&tenant("theirs"), 30, 50),
    );
    assert_eq!(put(&*tier, &ours) + put(&*tier, &theirs), 730);
    server.say(&["SET", "somebody's", "value"]);
    tier.clear(Some(&tenant("ours").name()));
    assert!(get(&*tier, &keys(&ours)).frames.is_empty());
    assert_all(&*tier, &theirs);
    tier.clear(None);
    assert!(get(&*tier, &keys(&theirs)).frames.is_empty());
    assert_eq!(server.say(&["GET", "somebody's"]), "value");
}

#[test]
fn a_closed_tier_misses_and_stores_nothing() {
    let server = Server::start("redis-server", &[]);
    let tier = open(&format!("redis://127.0.0.1:{}", server.port));
    let ours = records(&tenant("ours"), 2, 10);
    put(&*tier, &ours);
    tier.close();
    assert_eq!(
        (put(&*tier, &ours), hits(&*tier, &ours)),
        (0, vec![false, false])
    );
    assert!(
        server.say(&["CLIENT", "LIST"]).lines().count() <= 1,
        "no connection is left"
    );
}

#[test]
fn the_servers_are_those_that_make_services_names() {
    for (program, says) in [
        ("redis-server", "Redis server"),
        ("valkey-server", "Valkey server"),
    ] {
        let output = Command::new(crate::servers::program(program))
            .arg("--version")
            .stderr(Stdio::null())
            .output();
        assert!(String::from_utf8_lossy(&output.unwrap().stdout).contains(says));
    }
}

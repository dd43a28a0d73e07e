//! Every form, every refusal, and that no secret is ever repeated.

use proptest::prelude::*;

use super::*;

fn redis(text: &str) -> RedisUrl {
    match RemoteUrl::parse(text) {
        Ok(RemoteUrl::Redis(url)) => url,
        other => panic!("{text}: {other:?}"),
    }
}

fn objects(text: &str) -> ObjectsUrl {
    match RemoteUrl::parse(text) {
        Ok(RemoteUrl::Objects(url)) => url,
        other => panic!("{text}: {other:?}"),
    }
}

fn at(host: &str, port: u16) -> Address {
    Address {
        host: host.into(),
        port,
    }
}

#[test]
fn one_server() {
    let url = redis("redis://cache");
    assert_eq!(url.topology, Topology::Single(at("cache", 6379)));
    assert_eq!(
        (url.login, url.database, url.tls, url.ttl),
        (Login::default(), 0, None, None)
    );
    let url = redis("valkey://:p%3Aw@[::1]:7000/3?ttl=60&prefix=team-a");
    assert_eq!(url.topology, Topology::Single(at("::1", 7000)));
    assert_eq!(
        url.login,
        Login {
            user: None,
            password: Some(Secret::new("p:w"))
        }
    );
    assert_eq!(
        (url.database, url.ttl, url.prefix.as_str()),
        (3, Some(Duration::from_secs(60)), "team-a")
    );
}

#[test]
fn case_o02_user_and_password_are_percent_decoded() {
    let url = redis("rediss://user:p%40ss@host:6380/0");
    assert_eq!(url.topology, Topology::Single(at("host", 6380)));
    assert_eq!(url.login.user.as_deref(), Some("user"));
    assert_eq!(url.login.password.as_ref().unwrap().reveal(), "p@ss");
    assert_eq!(url.tls, Some(TlsFiles::default()));
    assert!(!format!("{url:?}").contains("p@ss"));
}

#[test]
fn tls_files() {
    let tls = redis("rediss://host?ca=/etc/ca.pem&cert=/c.pem&key=/k.pem")
        .tls
        .unwrap();
    assert_eq!(tls.authorities, Some("/etc/ca.pem".into()));
    assert_eq!(tls.identity, Some(("/c.pem".into(), "/k.pem".into())));
}

#[test]
fn clusters() {
    for text in [
        "redis-cluster://a:1,b,[::2]:3",
        "redis://a:1,b,[::2]:3",
        "valkey+cluster://a:1,b,[::2]:3",
    ] {
        let nodes = vec![at("a", 1), at("b", 6379), at("::2", 3)];
        assert_eq!(redis(text).topology, Topology::Cluster(nodes), "{text}");
    }
    assert!(redis("rediss-cluster://a").tls.is_some());
}

#[test]
fn sentinels() {
    for scheme in ["redis-sentinel", "redis+sentinel", "valkey-sentinel"] {
        let url = redis(&format!(
            "{scheme}://u:p@a,b:1/my%20master/2?sentinel_user=s&sentinel_password=t%26"
        ));
        let login = Login {
            user: Some("s".into()),
            password: Some(Secret::new("t&")),
        };
        let sentinels = vec![at("a", 26379), at("b", 1)];
        assert_eq!(
            url.topology,
            Topology::Sentinel {
                sentinels,
                master: "my master".into(),
                login
            }
        );
        assert_eq!((url.login.user.as_deref(), url.database), (Some("u"), 2));
    }
}

#[test]
fn sockets() {
    let url = redis("unix:///run/redis%20a.sock?db=1");
    assert_eq!(
        (url.topology, url.database),
        (Topology::Socket("/run/redis a.sock".into()), 1)
    );
    assert!(
        redis("redis+unix://:pw@/run/redis.sock")
            .login
            .password
            .is_some()
    );
}

#[test]
fn object_stores() {
    let url = objects("s3://bucket/a/b/?endpoint=http://127.0.0.1:9000&region=eu-1&ca=/ca.pem");
    assert_eq!(
        (
            url.bucket.as_str(),
            url.prefix.as_str(),
            url.region.as_str()
        ),
        ("bucket", "a/b", "eu-1")
    );
    assert_eq!(
        url.endpoint,
        Some(Endpoint {
            tls: false,
            address: at("127.0.0.1", 9000)
        })
    );
    assert_eq!(
        objects("s3://b?endpoint=https://h/").endpoint,
        Some(Endpoint {
            tls: true,
            address: at("h", 443)
        })
    );
    assert_eq!(
        (url.signer, url.authorities),
        (Signer::Environment, Some("/ca.pem".into()))
    );
    assert_eq!(
        objects("s3://id:s%2Fk@bucket").signer,
        Signer::Given("id".into(), Secret::new("s/k"))
    );
    assert_eq!(
        objects("s3://bucket?credentials=anonymous").signer,
        Signer::Anonymous
    );
}

#[test]
fn case_o02_shares_have_one_meaning() {
    assert_eq!(
        RemoteUrl::parse("file:///mnt/kv"),
        Ok(RemoteUrl::Share("/mnt/kv".into()))
    );
    for text in [
        "file://mnt/kv",
        "file://./kv",
        "file://~/kv",
        "file:///",
        "file:///a/../b",
        "/mnt/kv",
        "kv",
        "file:/mnt",
    ] {
        assert!(RemoteUrl::parse(text).is_err(), "{text}");
    }
}

#[test]
fn what_is_wrong_is_said_with_what_belongs_there() {
    for (text, says) in [
        ("", "begins with none of redis://"),
        ("cache:6379", "begins with none of redis://"),
        ("http://host", "scheme is none of redis://"),
        ("lm://host:1", "scheme is none of redis://"),
        ("redis://", "a host must be a name"),
        ("redis://ho st", "percent-encoded"),
        ("redis://h\u{7}", "percent-encoded"),
        ("redis://h:0", "1 to 65535"),
        ("redis://h:65536", "1 to 65535"),
        ("redis://h:+1", "1 to 65535"),
        ("redis://h:", "1 to 65535"),
        ("redis://[::1", "[ without ]"),
        ("redis://[::g]", "no IPv6"),
        ("redis://[::1]7", "1 to 65535"),
        ("redis://::1", "a host must be a name"),
        ("redis://h/x", "number of a database"),
        ("redis://h/0/1", "number of a database"),
        ("redis://h/4294967296", "number of a database"),
        ("redis://user@h", "without a password"),
        ("redis://u:p%4@h", "hexadecimal"),
        ("redis://u:p%ff@h", "UTF-8"),
        ("redis://u:p%00@h", "UTF-8"),
        ("redis://u:p/w@h", "%40"),
        ("redis://u:p?w@h", "%40"),
        ("redis://u:p#w@h", "%23"),
        ("redis://h?ttl=0", "option ttl"),
        ("redis://h?ttl=1h", "option ttl"),
        ("redis://h?ttl=1&ttl=2", "twice"),
        ("redis://h?ttl", "name=value"),
        ("redis://h?prefix={a}", "option prefix"),
        ("redis://h?color=blue", "no option color"),
        ("redis://h?ca=/x", "no option ca"),
        ("rediss://h?ca=x", "absolute path"),
        ("rediss://h?cert=/x", "belong together"),
        ("redis-cluster://h/1", "database 0 only"),
        ("redis-cluster://h,,i", "a host must be a name"),
        ("redis-sentinel://h:1", "master is missing"),
        ("redis-sentinel://h:1/", "master is missing"),
        ("unix://run/redis.sock", "three slashes"),
        ("unix:///", "absolute"),
        ("s3://", "bucket"),
        ("s3://b%2Fc", "bucket"),
        ("s3://bucket/a//b", "prefix"),
        ("s3://bucket/../b", "prefix"),
        ("s3://id@bucket", "without a password"),
        ("s3://:secret@bucket", "both halves"),
        ("s3://bucket?endpoint=host:1", "http:// or https://"),
        ("s3://bucket?region=eu/west", "option region"),
        ("s3://bucket?credentials=mine", "environment or anonymous"),
        (
            "s3://i:s@bucket?credentials=anonymous",
            "exclude each other",
        ),
    ] {
        let error = RemoteUrl::parse(text).expect_err(text).to_string();
        assert!(error.contains(says), "{text}: {error}");
    }
}

#[test]
fn case_o02_secrets_are_redacted() {
    for (text, shown) in [
        (
            "rediss://user:p%40ss@host:6380/0",
            "rediss://user:***@host:6380/0",
        ),
        ("redis://:secret@host", "redis://:***@host"),
        ("redis://secret@host", "redis://:***@host"),
        ("redis://u:a/b@c@host/1?ttl=3", "redis://u:***@host/1?ttl=3"),
        ("redis://u:secret?x@host", "redis://***"),
        ("u:secret@host", "u:***@host"),
        (
            "s3://id:secret@b?endpoint=http://h&region=r",
            "s3://id:***@b?endpoint=http://h&region=r",
        ),
        (
            "redis-sentinel://h/m?sentinel_password=x&ttl=1",
            "redis-sentinel://h/m?sentinel_password=***&ttl=1",
        ),
        ("redis://h?passwort=x&junk", "redis://h?passwort=***&***"),
        ("redis://host/0", "redis://host/0"),
        ("redis://u:secrethost:6379/0", "redis://u:***/0"),
        ("redis://:7secret", "redis://:***"),
        ("redis-cluster://a:1,b:2/", "redis-cluster://a:1,b:2/"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis://?@?sentinel_password=secret", "redis://***"),
        (
            "redis://h?ttl=?sentinel_password=secret",
            "redis://h?ttl=***",
        ),
        (
            "redis-sentinel://h/m?sentinel_password=se@cret",
            "redis-sentinel://***",
        ),
    ] {
        assert_eq!(redacted(text), shown);
    }
}

/// Percent-encodes everything that is no letter or digit.
fn encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| {
            if byte.is_ascii_alphanumeric() {
                char::from(byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Whatever stands there, an answer comes, and neither it nor the redacted text holds the password.
    #[test]
    fn any_text_is_answered_and_no_password_is_repeated(
        before in "[a-z0-9+:/@?&=%#.,\\[\\] -]{0,12}",
        scheme in prop::sample::select(vec!["redis", "rediss", "redis-cluster", "redis-sentinel", "unix", "s3", "file", "x"]),
        user in "[a-z]{0,4}",
        junk in "[a-z0-9+:/@?&=%#.,\\[\\]{}~\u{e9} -]{0,24}",
    ) {
        // Capitals: nothing else in the text has them.
        for text in [
            format!("{before}{scheme}://{user}:SECRET{junk}@host/{junk}"),
            format!("{scheme}://{user}:SECRET@{junk}"),
            format!("{scheme}://{user}:{junk}SECRET@host:1/0"),
            format!("{scheme}://{junk}?sentinel_password=SECRET"),
        ] {
            if let Err(error) = RemoteUrl::parse(&text) {
                prop_assert!(!error.to_string().contains("SECRET"), "{} says {}", text, error);
            }
            prop_assert!(!redacted(&text).contains("SECRET"), "{} shown as {}", text, redacted(&text));
        }
    }

    /// Bytes of anybody's never panic.
    #[test]
    fn any_bytes_are_answered(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        let text = String::from_utf8_lossy(&bytes);
        let _ = RemoteUrl::parse(&text);
        let _ = redacted(&text);
    }

    /// What is encoded comes back.
    #[test]
    fn encoded_parts_come_back(user in "\\PC{1,12}", password in "\\PC{1,12}", port in 1_u16.., db in 0_u32..) {
        let text = format!("redis://{}:{}@host:{port}/{db}", encoded(&user), encoded(&password));
        let url = redis(&text);
        prop_assert_eq!(url.login.user.as_deref(), Some(user.as_str()));
        prop_assert_eq!(url.login.password.as_ref().unwrap().reveal(), password.as_str());
        prop_assert_eq!((url.topology, url.database), (Topology::Single(at("host", port)), db));
    }
}

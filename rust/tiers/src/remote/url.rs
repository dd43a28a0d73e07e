//! Where a remote tier is: the value of `remote_url`, parsed strictly.
//!
//! ```text
//! redis://[user[:password]@]host[:port][/db]          rediss:// for TLS
//! redis-cluster://[user[:password]@]host[:port],…     rediss-cluster://; several hosts behind redis:// mean the same
//! redis-sentinel://[user[:password]@]host[:port],…/master[/db]    rediss-sentinel://
//! unix://[user[:password]@]/path/of/socket
//! s3://bucket[/prefix]
//! file:///directory
//! ```
//!
//! `valkey` may stand for `redis`, and `redis+unix`, `redis+cluster`, `redis+sentinel` for what has the same words. User,
//! password, names and paths are percent-decoded. Options follow behind `?`. What is not understood is an error: nothing is
//! guessed, and nothing that could be a secret is repeated.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// Port of a Redis or Valkey server.
pub const REDIS_PORT: u16 = 6379;
/// Port of a Sentinel.
pub const SENTINEL_PORT: u16 = 26379;

const FORMS: &str =
    "redis://, rediss://, redis-cluster://, redis-sentinel://, unix://, s3:// or file:///";

/// A text that is not shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps it.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Host and port.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    /// Name or number; an IPv6 number without its brackets.
    pub host: String,
    /// Port.
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Who logs in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Login {
    /// `default` when there is none.
    pub user: Option<String>,
    /// Password.
    pub password: Option<Secret>,
}

/// Files for TLS, all PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Authorities to trust instead of the system's.
    pub authorities: Option<PathBuf>,
    /// Own certificate chain and private key, where the server asks for them.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// How the servers are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Topology {
    /// One server.
    Single(Address),
    /// One server on this machine.
    Socket(PathBuf),
    /// Any of a cluster's nodes.
    Cluster(Vec<Address>),
    /// Whoever the sentinels say is the master of that name.
    Sentinel {
        /// Sentinels.
        sentinels: Vec<Address>,
        /// Name of the master.
        master: String,
        /// Who logs in to the sentinels.
        login: Login,
    },
}

/// Redis or Valkey.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisUrl {
    /// How the servers are found.
    pub topology: Topology,
    /// Who logs in.
    pub login: Login,
    /// Number of the database.
    pub database: u32,
    /// Present for TLS.
    pub tls: Option<TlsFiles>,
    /// How long a record lives after it was written; the server's own eviction alone decides without.
    pub ttl: Option<Duration>,
    /// Stands before every key, with a colon.
    pub prefix: String,
}

/// Who signs requests to an object store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Signer {
    /// Key id and secret from the URL.
    Given(String, Secret),
    /// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`.
    Environment,
    /// Nobody.
    Anonymous,
}

/// Where an object store that is not Amazon's listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// `https`.
    pub tls: bool,
    /// Host and port.
    pub address: Address,
}

/// An S3-compatible object store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectsUrl {
    /// Bucket.
    pub bucket: String,
    /// Before every object's name, without slashes at its ends; may be empty.
    pub prefix: String,
    /// Amazon's own when there is none.
    pub endpoint: Option<Endpoint>,
    /// Region.
    pub region: String,
    /// Who signs.
    pub signer: Signer,
    /// Authorities to trust instead of the system's, PEM.
    pub authorities: Option<PathBuf>,
}

/// What a URL names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteUrl {
    /// Redis or Valkey.
    Redis(RedisUrl),
    /// An object store.
    Objects(ObjectsUrl),
    /// A directory that several machines share.
    Share(PathBuf),
}

/// Why a text is no such URL; holds no secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UrlError(pub String);

impl fmt::Display for UrlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UrlError {}

type Parsed<T> = Result<T, UrlError>;

fn refuse<T>(why: impl Into<String>) -> Parsed<T> {
    Err(UrlError(why.into()))
}

impl RemoteUrl {
    /// Reads a URL. The error says what is wrong and what belongs there.
    pub fn parse(text: &str) -> Parsed<Self> {
        if let Some(odd) = text.chars().find(|&c| c.is_control() || c.is_whitespace()) {
            return refuse(format!("character {odd:?} in it must be percent-encoded"));
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return refuse(format!("it begins with none of {FORMS}"));
        };
        if rest.contains('#') {
            return refuse("a # in user, password or path must be written %23");
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        // A later @ is a password with a slash or a question mark in it, most likely.
        if path.contains('@') || query.contains('@') {
            return refuse(
                "an @ behind the host must be written %40, and / ? # in a password %2F %3F %23",
            );
        }
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let mut parts = Parts {
            login,
            hosts,
            path,
            options: Options::parse(query)?,
        };
        let scheme = scheme.to_ascii_lowercase().replace('+', "-");
        let scheme = match scheme.strip_prefix("valkey") {
            Some(rest) => format!("redis{rest}"),
            None => scheme,
        };
        let tls = scheme.starts_with("rediss");
        let url = match scheme.as_str() {
            "redis" | "rediss" if !hosts.contains(',') => Self::Redis(parts.single(tls)?),
            "redis" | "rediss" | "redis-cluster" | "rediss-cluster" => {
                Self::Redis(parts.cluster(tls)?)
            }
            "redis-sentinel" | "rediss-sentinel" => Self::Redis(parts.sentinel(tls)?),
            "unix" | "redis-unix" => Self::Redis(parts.socket()?),
            "s3" => Self::Objects(parts.objects()?),
            "file" => Self::Share(parts.share()?),
            _ => return refuse(format!("its scheme is none of {FORMS}")),
        };
        parts.options.nothing_left()?;
        Ok(url)
    }
}

/// `text` for people: what may be a password or a key is `***`, whether the text is a URL or not.
pub fn redacted(text: &str) -> String {
    let start = text.find("://").map_or(0, |at| at + 3);
    let (scheme, rest) = text.split_at(start);
    let (mut shown, rest) = match rest.rsplit_once('@') {
        None => match unnamed_secret(rest).filter(|_| start > 0) {
            None => (scheme.to_string(), rest),
            Some((user, rest)) => (format!("{scheme}{user}:***"), rest),
        },
        Some((login, rest)) => {
            // Without a colon, what stands there is as likely a password.
            let user = login.split_once(':').map_or("", |(user, _)| user);
            if login.contains('?') || user.contains('@') {
                // A password with such characters in it, or an option's value: nobody knows where it ends.
                return format!("{scheme}***");
            }
            (format!("{scheme}{user}:***@"), rest)
        }
    };
    let (place, query) = rest
        .split_once('?')
        .map_or((rest, None), |(place, query)| (place, Some(query)));
    shown.push_str(place);
    for (index, option) in query
        .into_iter()
        .flat_map(|query| query.split('&'))
        .enumerate()
    {
        shown.push(if index == 0 { '?' } else { '&' });
        match option.split_once('=') {
            Some((name, value)) if OPEN.contains(&name) && !value.contains(['?', '=']) => {
                shown.push_str(option)
            }
            Some((name, _)) => shown.extend([name, "=***"]),
            None => shown.push_str("***"),
        }
    }
    shown
}

/// What stands before and behind something in the place of a port that is none: a password whose `@` was forgotten.
fn unnamed_secret(rest: &str) -> Option<(&str, &str)> {
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, behind) = rest.split_at(end);
    let (user, port) = authority.split_once(':')?;
    let digits = port.trim_start_matches(|c: char| c.is_ascii_digit());
    let is_port = digits.len() < port.len()
        && !digits.starts_with(|c: char| c.is_alphanumeric() || "._-".contains(c));
    (!user.starts_with('[') && !port.is_empty() && !is_port).then_some((user, behind))
}

/// Options whose values are no secrets.
const OPEN: [&str; 9] = [
    "ttl",
    "prefix",
    "ca",
    "cert",
    "key",
    "endpoint",
    "region",
    "credentials",
    "sentinel_user",
];

struct Parts<'a> {
    login: Option<&'a str>,
    hosts: &'a str,
    path: &'a str,
    options: Options<'a>,
}

impl Parts<'_> {
    fn single(&mut self, tls: bool) -> Parsed<RedisUrl> {
        let address = address(self.hosts, REDIS_PORT)?;
        let database = database(self.path)?;
        self.redis(Topology::Single(address), database, tls)
    }

    fn cluster(&mut self, tls: bool) -> Parsed<RedisUrl> {
        if database(self.path)? != 0 {
            return refuse("a cluster has database 0 only: leave the path out");
        }
        let nodes = addresses(self.hosts, REDIS_PORT)?;
        self.redis(Topology::Cluster(nodes), 0, tls)
    }

    fn sentinel(&mut self, tls: bool) -> Parsed<RedisUrl> {
        let path = self.path.strip_prefix('/').unwrap_or("");
        let (master, number) = path.split_at(path.find('/').unwrap_or(path.len()));
        let master = decoded("the master's name", master)?;
        if master.is_empty() {
            return refuse(
                "the name of the sentinels' master is missing: redis-sentinel://host:26379,host:26379/master",
            );
        }
        let number = database(number)?;
        let user = self.options.text("sentinel_user")?;
        let password = self.options.text("sentinel_password")?.map(Secret);
        let sentinels = addresses(self.hosts, SENTINEL_PORT)?;
        let topology = Topology::Sentinel {
            sentinels,
            master,
            login: Login { user, password },
        };
        self.redis(topology, number, tls)
    }

    fn socket(&mut self) -> Parsed<RedisUrl> {
        if !self.hosts.is_empty() {
            return refuse("a socket has no host: unix:///path/of/socket, with three slashes");
        }
        let path = absolute(self.path, "unix:///path/of/socket")?;
        let number = self.options.number("db", 0, u32::MAX.into())?.unwrap_or(0);
        self.redis(Topology::Socket(path), number as u32, false)
    }

    fn redis(&mut self, topology: Topology, database: u32, tls: bool) -> Parsed<RedisUrl> {
        let ttl = self.options.number("ttl", 1, 10 * 365 * 86_400)?;
        let prefix = self.options.text("prefix")?.unwrap_or_default();
        // Nothing that a cluster hashes apart or that SCAN takes for a pattern.
        if !prefix
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte))
        {
            return refuse(
                "option prefix must be letters, digits, dots, colons, underscores and hyphens",
            );
        }
        let tls = if tls {
            let authorities = self.options.path("ca")?;
            let identity = match (self.options.path("cert")?, self.options.path("key")?) {
                (Some(cert), Some(key)) => Some((cert, key)),
                (None, None) => None,
                _ => {
                    return refuse(
                        "options cert and key belong together: give both files, or none",
                    );
                }
            };
            Some(TlsFiles {
                authorities,
                identity,
            })
        } else {
            None
        };
        let login = self.login.map_or_else(|| Ok(Login::default()), login)?;
        Ok(RedisUrl {
            topology,
            login,
            database,
            tls,
            ttl: ttl.map(Duration::from_secs),
            prefix,
        })
    }

    fn objects(&mut self) -> Parsed<ObjectsUrl> {
        let bucket = decoded("the bucket", self.hosts)?;
        let plain = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        if bucket.is_empty() || !bucket.chars().all(plain) {
            return refuse(
                "the bucket's name must be letters, digits, dots and hyphens: s3://bucket/prefix",
            );
        }
        let prefix = decoded("the prefix", self.path.trim_matches('/'))?;
        if prefix.split('/').any(|part| part == "." || part == "..") || prefix.contains("//") {
            return refuse("the prefix must have no empty, . or .. part: s3://bucket/prefix");
        }
        let endpoint = match self.options.text("endpoint")? {
            None => None,
            Some(text) => {
                let (tls, rest) =
                    match (text.strip_prefix("https://"), text.strip_prefix("http://")) {
                        (Some(rest), _) => (true, rest),
                        (_, Some(rest)) => (false, rest),
                        _ => return refuse("option endpoint must begin with http:// or https://"),
                    };
                let port = if tls { 443 } else { 80 };
                let address = address(rest.strip_suffix('/').unwrap_or(rest), port)?;
                Some(Endpoint { tls, address })
            }
        };
        let credentials = self.options.text("credentials")?;
        let signer = match (self.login, credentials.as_deref()) {
            (Some(text), None) => match login(text)? {
                Login {
                    user: Some(id),
                    password: Some(secret),
                } => Signer::Given(id, secret),
                _ => {
                    return refuse(
                        "both halves of the access key belong before the @: s3://id:secret@bucket",
                    );
                }
            },
            (None, None | Some("environment")) => Signer::Environment,
            (None, Some("anonymous")) => Signer::Anonymous,
            (None, Some(_)) => {
                return refuse("option credentials must be environment or anonymous");
            }
            (Some(_), Some(_)) => {
                return refuse(
                    "an access key before the @ and option credentials exclude each other",
                );
            }
        };
        let region = self
            .options
            .text("region")?
            .unwrap_or_else(|| "us-east-1".into());
        if !region
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        {
            return refuse("option region must be letters, digits and hyphens");
        }
        let authorities = self.options.path("ca")?;
        Ok(ObjectsUrl {
            bucket,
            prefix,
            endpoint,
            region,
            signer,
            authorities,
        })
    }

    fn share(&mut self) -> Parsed<PathBuf> {
        if !self.hosts.is_empty() || self.login.is_some() {
            return refuse(
                "a share is mounted here and has no host: file:///directory, with three slashes",
            );
        }
        absolute(self.path, "file:///directory")
    }
}

/// What stands behind the `?`, taken out one by one.
struct Options<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Options<'a> {
    fn parse(query: &'a str) -> Parsed<Self> {
        let mut options: Vec<(&str, &str)> = Vec::new();
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let Some((name, value)) = option.split_once('=') else {
                return refuse("an option must be name=value");
            };
            if options.iter().any(|(known, _)| *known == name) {
                return refuse(format!("option {} is given twice", shown(name)));
            }
            options.push((name, value));
        }
        Ok(Self(options))
    }

    fn text(&mut self, name: &str) -> Parsed<Option<String>> {
        let Some(at) = self.0.iter().position(|(known, _)| *known == name) else {
            return Ok(None);
        };
        let text = decoded(&format!("option {name}"), self.0.swap_remove(at).1)?;
        if text.is_empty() {
            return refuse(format!("option {name} is empty: leave it out"));
        }
        Ok(Some(text))
    }

    fn number(&mut self, name: &str, least: u64, most: u64) -> Parsed<Option<u64>> {
        let Some(text) = self.text(name)? else {
            return Ok(None);
        };
        whole(&text)
            .filter(|number| (least..=most).contains(number))
            .map_or_else(
                || {
                    refuse(format!(
                        "option {name} must be a whole number from {least} to {most}"
                    ))
                },
                |n| Ok(Some(n)),
            )
    }

    fn path(&mut self, name: &str) -> Parsed<Option<PathBuf>> {
        match self.text(name)? {
            Some(path) if !path.starts_with('/') => {
                refuse(format!("option {name} must be an absolute path"))
            }
            path => Ok(path.map(PathBuf::from)),
        }
    }

    fn nothing_left(&self) -> Parsed<()> {
        self.0.first().map_or(Ok(()), |(name, _)| {
            refuse(format!("it has no option {}", shown(name)))
        })
    }
}

/// An option's name, unless it could be something else.
fn shown(name: &str) -> &str {
    let word = name.len() <= 32
        && name
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    if word { name } else { "of that name" }
}

fn login(text: &str) -> Parsed<Login> {
    let (user, password) = match text.split_once(':') {
        Some((user, password)) => (user, Some(decoded("the password", password)?)),
        None => (text, None),
    };
    let user = Some(decoded("the user", user)?).filter(|user| !user.is_empty());
    let password = password.filter(|password| !password.is_empty()).map(Secret);
    match (&user, &password) {
        (Some(_), None) => refuse(
            "a user without a password: user:password@host, or :password@host for the default user",
        ),
        _ => Ok(Login { user, password }),
    }
}

fn addresses(hosts: &str, port: u16) -> Parsed<Vec<Address>> {
    hosts.split(',').map(|host| address(host, port)).collect()
}

fn address(text: &str, port: u16) -> Parsed<Address> {
    let (host, number) = if let Some(rest) = text.strip_prefix('[') {
        let Some((host, number)) = rest.split_once(']') else {
            return refuse("a [ without ] in the host");
        };
        if host.parse::<std::net::Ipv6Addr>().is_err() {
            return refuse("what stands in [ ] is no IPv6 address");
        }
        (host, number)
    } else {
        let (host, number) = text.split_at(text.find(':').unwrap_or(text.len()));
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        if host.is_empty() || host.len() > 253 || !host.bytes().all(plain) {
            return refuse("a host must be a name, an IPv4 address or an IPv6 address in [ ]");
        }
        (host, number)
    };
    let port = match number.strip_prefix(':') {
        None if number.is_empty() => Some(port),
        Some(digits) => whole(digits)
            .and_then(|port| u16::try_from(port).ok())
            .filter(|&port| port > 0),
        None => None,
    };
    let Some(port) = port else {
        return refuse("a port must be a whole number from 1 to 65535: host:port");
    };
    Ok(Address {
        host: host.to_string(),
        port,
    })
}

/// `/3`, `/` or nothing.
fn database(path: &str) -> Parsed<u32> {
    match path.strip_prefix('/').unwrap_or(path) {
        "" => Ok(0),
        digits => whole(digits)
            .and_then(|number| u32::try_from(number).ok())
            .map_or_else(
                || refuse("the path must be the number of a database: host:port/0"),
                Ok,
            ),
    }
}

fn absolute(path: &str, form: &str) -> Parsed<PathBuf> {
    let path = decoded("the path", path)?;
    if path.trim_matches('/').is_empty() || path.split('/').any(|part| part == "." || part == "..")
    {
        return refuse(format!(
            "its path must be absolute, without . and .. parts: {form}"
        ));
    }
    Ok(PathBuf::from(path))
}

/// Digits only: no sign, no blanks.
fn whole(digits: &str) -> Option<u64> {
    (!digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
        .then(|| digits.parse().ok())?
}

/// Percent-decoded text.
fn decoded(what: &str, text: &str) -> Parsed<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, behind)) = rest.split_first() {
        rest = behind;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |at: usize| {
            behind
                .get(at)
                .and_then(|&byte| char::from(byte).to_digit(16))
        };
        let (Some(high), Some(low)) = (digit(0), digit(1)) else {
            return refuse(format!(
                "{what} has a % without two hexadecimal digits: a % itself is written %25"
            ));
        };
        bytes.push((high * 16 + low) as u8);
        rest = &behind[2..];
    }
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => refuse(format!(
            "{what} is no UTF-8 text once it is percent-decoded"
        )),
    }
}

#[cfg(test)]
mod tests;

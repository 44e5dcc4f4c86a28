use super::*;

const HEAD: &str = "[[network]]\nname = \"blue\"\n[[em]]\nname = \"em0\"\n  [[em.function]]\n  name = \"net0\"\n  kind = \"virtio-net\"\n";
const MAC: &str = "  mac = \"02:00:00:00:00:01\"\n";
const NETWORK: &str = "  network = \"blue\"\n";

fn complaint(text: &str) -> String {
    match Config::parse("dpu.toml", text) {
        Ok(config) => format!("accepted: {config:?}"),
        Err(e) => e.to_string(),
    }
}

/// What is said about a function that is right but for `lines`, which start at line 8.
fn function_complaint(lines: &str) -> String {
    let mac = if lines.contains("mac =") { "" } else { MAC };
    let network = if lines.contains("port =") || lines.contains("network =") {
        ""
    } else {
        NETWORK
    };
    complaint(&format!("{HEAD}  {lines}\n{mac}{network}"))
}

#[test]
fn a_small_file_gets_the_defaults() {
    let config = Config::parse("dpu.toml", &format!("{HEAD}{MAC}{NETWORK}")).unwrap();
    assert_eq!(config.run_dir, PathBuf::from("/run/distdpu"));
    assert_eq!(config.em_binary, None);
    let em = &config.ems[0];
    assert!(em.managed);
    assert_eq!(
        em.functions[0],
        FunctionConfig {
            name: "net0".into(),
            kind: FunctionKind::VirtioNet(NetConfig {
                queue_pairs: 1,
                queue_size: 256,
                speed_mbps: None,
                face: Face::VfioUser,
            }),
            vm: None,
            mac: MacAddress([2, 0, 0, 0, 0, 1]),
            ip: None,
            mtu: 1500,
            socket: "/run/distdpu/net0.sock".into(),
            attachment: Attachment::Network("blue".into()),
            capture: None,
            link_up: true,
        }
    );
}

#[test]
fn a_full_file_is_taken_as_written() {
    let config = Config::parse(
        "dpu.toml",
        r#"
[dpu]
run_dir = "/tmp/x"
em_binary = "/opt/em"
[[em]]
name = "em0"
managed = false
  [[em.function]]
  name = "net0"
  kind = "virtio-net"
  mac = "02:00:00:00:00:01"
  ip = "10.0.0.1/24"
  mtu = 9000
  queue_pairs = 4
  queue_size = 1024
  speed_mbps = 25_000
  socket = "/tmp/y.sock"
  port = { tap = "tap0" }
  capture = "net0.pcap"
  link = "down"
  [[em.function]]
  name = "net1"
  kind = "virtio-net"
  mac = "02:00:00:00:00:02"
  port = { loopback = true }
  [[em.function]]
  name = "net2"
  kind = "virtio-net"
  mac = "02:00:00:00:00:03"
  port = { null = true }
"#,
    )
    .unwrap();
    let [net0, net1, net2] = &config.ems[0].functions[..] else {
        panic!("three functions");
    };
    assert!(!config.ems[0].managed);
    assert_eq!(config.em_binary, Some("/opt/em".into()));
    assert_eq!(net0.attachment, Attachment::Tap("tap0".into()));
    assert_eq!(net0.mtu, 9000);
    assert_eq!(
        net0.kind,
        FunctionKind::VirtioNet(NetConfig {
            queue_pairs: 4,
            queue_size: 1024,
            speed_mbps: Some(25_000),
            face: Face::VfioUser,
        })
    );
    assert_eq!(net0.ip.unwrap().to_string(), "10.0.0.1/24");
    assert_eq!(net0.socket, PathBuf::from("/tmp/y.sock"));
    assert_eq!(net0.capture, Some("net0.pcap".into()));
    assert!(!net0.link_up);
    assert_eq!(net1.attachment, Attachment::Loopback);
    assert_eq!(net2.attachment, Attachment::Null);
}

#[test]
fn a_function_may_have_another_face() {
    let face = |lines: &str| {
        let text = format!("{HEAD}{lines}{MAC}{NETWORK}");
        let config = Config::parse("dpu.toml", &text).unwrap();
        let function = config.ems[0].functions[0].clone();
        (function.face(), function.dials())
    };
    let server = Face::VhostUser(VhostMode::Server);
    assert_eq!(face("face = \"vfio-user\"\n"), (Face::VfioUser, false));
    assert_eq!(face("face = \"vhost-user\"\n"), (server, false));
    let lines = "face = \"vhost-user\"\nvhost_mode = \"server\"\n";
    assert_eq!(face(lines), (server, false));
    let lines = "face = \"vhost-user\"\nvhost_mode = \"client\"\n";
    assert_eq!(face(lines), (Face::VhostUser(VhostMode::Client), true));
    let text = format!("{HEAD}vhost_mode = \"client\"\n{MAC}{NETWORK}");
    let said = complaint(&text);
    let wanted = "`vhost_mode` is for functions with `face = \"vhost-user\"`";
    assert!(said.ends_with(wanted), "{said}");
}

#[test]
fn every_wrong_value_of_a_function_is_named_with_its_line_and_what_it_may_be() {
    let long = format!("/tmp/{}", "x".repeat(110));
    let cases: &[(&str, &str)] = &[
        (
            "face = \"vduse\"",
            "`face` is \"vduse\"; it must be \"vfio-user\" or \"vhost-user\"",
        ),
        (
            "queue_size = 300",
            "`queue_size` is 300; it must be a power of two from 16 to 32768",
        ),
        (
            "queue_size = 8",
            "`queue_size` is 8; it must be a power of two from 16 to 32768",
        ),
        (
            "queue_size = -1",
            "`queue_size` is -1; it must be a power of two from 16 to 32768",
        ),
        (
            "queue_size = \"256\"",
            "`queue_size` is a string; it must be a power of two from 16 to 32768",
        ),
        (
            "mtu = 67",
            "`mtu` is 67; it must be an integer from 68 to 9000",
        ),
        (
            "mtu = 9001",
            "`mtu` is 9001; it must be an integer from 68 to 9000",
        ),
        (
            "mtu = 99999999999999999999",
            "`mtu` is 99999999999999999999; it must be an integer from 68 to 9000",
        ),
        (
            "mtu = 1500.0",
            "`mtu` is a fraction; it must be an integer from 68 to 9000",
        ),
        (
            "queue_pairs = 0",
            "`queue_pairs` is 0; it must be an integer from 1 to 32",
        ),
        (
            "queue_pairs = 33",
            "`queue_pairs` is 33; it must be an integer from 1 to 32",
        ),
        (
            "speed_mbps = 0",
            "`speed_mbps` is 0; it must be an integer from 1 to 2147483647",
        ),
        (
            "mac = \"02:00:00:00:00\"",
            "`mac` is \"02:00:00:00:00\"; it must be a unicast MAC address, like \"02:00:00:00:00:01\"",
        ),
        (
            "mac = \"01:00:5e:00:00:01\"",
            "`mac` is \"01:00:5e:00:00:01\", a multicast address; it must be a unicast MAC address, like \"02:00:00:00:00:01\"",
        ),
        (
            "mac = \"00:00:00:00:00:00\"",
            "`mac` is \"00:00:00:00:00:00\"; it must be a unicast MAC address, like \"02:00:00:00:00:01\"",
        ),
        (
            "mac = 2",
            "`mac` is an integer; it must be a unicast MAC address, like \"02:00:00:00:00:01\"",
        ),
        (
            "ip = \"10.0.0.1\"",
            "`ip` is \"10.0.0.1\"; it must be an address with its prefix length, like \"10.0.0.1/24\"",
        ),
        (
            "link = \"sideways\"",
            "`link` is \"sideways\"; it must be \"up\" or \"down\"",
        ),
        (
            "link = true",
            "`link` is true or false; it must be \"up\" or \"down\"",
        ),
        (
            "network = \"red\"",
            "`network` is \"red\"; it must be \"blue\"",
        ),
        (
            "port = { tap = \"a-name-too-long-for-linux\" }",
            "`tap` is \"a-name-too-long-for-linux\"; it must be the name of a TAP interface, 1 to 15 bytes",
        ),
        (
            "port = { loopback = true, null = true }",
            "`port` must be exactly one of { tap = \"NAME\" }, { loopback = true } or { null = true }",
        ),
        (
            "port = { loopback = false }",
            "`port` must be exactly one of { tap = \"NAME\" }, { loopback = true } or { null = true }",
        ),
        (
            "port = { veth = \"v0\" }",
            "`port` has no key `veth`; its keys are `loopback`, `null`, `tap`",
        ),
        (
            "port = \"tap0\"",
            "`port` is a string; it must be { tap = \"NAME\" }, { loopback = true } or { null = true }",
        ),
        (
            "network = \"blue\"\n  port = { null = true }",
            "function \"net0\" has both `network` and `port`; keep one",
        ),
        (
            "socket = \"net0.sock\"",
            "`socket` is \"net0.sock\"; it must be the absolute path of a socket to make",
        ),
        (
            "socket = \"/run/distdpu/m2m.sock\"",
            "the socket path /run/distdpu/m2m.sock is one of the OM's own; choose another `socket`",
        ),
        (
            "capture = \"\"",
            "`capture` is \"\"; it must be the path of a pcap file to write",
        ),
        (
            "quue_size = 256",
            "[[em.function]] has no key `quue_size`; its keys are `capture`, `face`, `ip`, `kind`, `link`, `mac`, `mtu`, `name`, `network`, `port`, `queue_pairs`, `queue_size`, `socket`, `speed_mbps`, `vhost_mode`, `vm`",
        ),
    ];
    for (lines, sentence) in cases {
        assert_eq!(
            function_complaint(lines),
            format!("dpu.toml:8: {sentence}"),
            "{lines}"
        );
    }
    assert_eq!(
        function_complaint(&format!("socket = \"{long}\"")),
        format!(
            "dpu.toml:8: the socket path {long} has 115 bytes; at most 107 are possible, choose a shorter `socket`"
        )
    );
}

#[test]
fn what_is_missing_is_said_at_the_table_that_lacks_it() {
    let cases = [
        ("", "dpu.toml: there is no `[[em]]`; a DPU has at least one EM".to_owned()),
        (
            "\n[[em]]\nname = \"em0\"\n",
            "dpu.toml:2: EM \"em0\" has no `[[em.function]]`; it needs at least one".to_owned(),
        ),
        (
            "[[em]]\nmanaged = true\n",
            "dpu.toml:1: [[em]] has no `name`; it must be 1 to 32 letters, digits, `-`, `_` or `.`, and start with a letter or digit".to_owned(),
        ),
    ];
    for (text, sentence) in cases {
        assert_eq!(complaint(text), sentence, "{text}");
    }
    assert_eq!(
        complaint(&format!("{HEAD}{NETWORK}")),
        "dpu.toml:5: [[em.function]] has no `mac`; it must be a unicast MAC address, like \"02:00:00:00:00:01\""
    );
    assert_eq!(
        complaint(&format!("{HEAD}{MAC}")),
        "dpu.toml:5: function \"net0\" has neither `network` nor `port`; it must have `network = \"NAME\"` or `port =` { tap = \"NAME\" }, { loopback = true } or { null = true }"
    );
}

#[test]
fn what_is_there_twice_is_said_at_the_second() {
    let good = format!("{HEAD}{MAC}{NETWORK}");
    let more = |name: &str, mac: &str, rest: &str| {
        format!(
            "{good}  [[em.function]]\n  name = \"{name}\"\n  kind = \"virtio-net\"\n  mac = \"{mac}\"\n  network = \"blue\"\n{rest}"
        )
    };
    let second = "02:00:00:00:00:02";
    let cases = [
        (
            more("net0", second, ""),
            "11: there are two functions named \"net0\"; give one another name",
        ),
        (
            more("net1", "02:00:00:00:00:01", ""),
            "13: `mac` 02:00:00:00:00:01 is already that of function \"net0\"; give one another address",
        ),
        (
            more("net1", second, "  socket = \"/run/distdpu/net0.sock\"\n"),
            "15: the socket path /run/distdpu/net0.sock is already that of function \"net0\"; choose another `socket`",
        ),
        (
            format!("{good}[[em]]\nname = \"em0\"\n"),
            "11: there are two EMs named \"em0\"; give one another name",
        ),
        (
            format!("{good}[[network]]\nname = \"blue\"\n"),
            "11: there are two networks named \"blue\"; give one another name",
        ),
    ];
    for (text, sentence) in cases {
        assert_eq!(complaint(&text), format!("dpu.toml:{sentence}"), "{text}");
    }
}

#[test]
fn wrong_tables_and_toml_that_is_none_are_named_with_their_line() {
    let cases = [
        (
            "[dpu]\nrun_dri = \"/x\"\n",
            "dpu.toml:2: [dpu] has no key `run_dri`; its keys are `em_binary`, `remote`, `run_dir`",
        ),
        (
            "[dpu]\nrun_dir = \"x\"\n",
            "dpu.toml:2: `run_dir` is \"x\"; it must be the absolute path of a folder",
        ),
        (
            "dpu = 3\n",
            "dpu.toml:1: `dpu` is an integer; it must be a table `[dpu]`",
        ),
        (
            "\n[em]\nname = \"em0\"\n",
            "dpu.toml:2: `em` is a table; it must be tables that each start with `[[em]]`",
        ),
        (
            "[[em]]\nname = \"a/b\"\n",
            "dpu.toml:2: `name` is \"a/b\"; it must be 1 to 32 letters, digits, `-`, `_` or `.`, and start with a letter or digit",
        ),
    ];
    for (text, sentence) in cases {
        assert_eq!(complaint(text), sentence, "{text}");
    }
    assert_eq!(
        complaint(&format!("[[ems]]\n{HEAD}{MAC}{NETWORK}")),
        "dpu.toml:1: the file has no key `ems`; its keys are `dpu`, `em`, `network`"
    );
    let not_toml = complaint("[dpu]\nrun_dir = \n");
    assert!(
        not_toml.starts_with("dpu.toml:2: this is not TOML: "),
        "{not_toml}"
    );
    assert!(!not_toml.contains('\n'), "{not_toml}");
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let e = Config::load(Path::new("/nonexistent/dpu.toml")).unwrap_err();
    assert_eq!(
        e.to_string(),
        "cannot read /nonexistent/dpu.toml: No such file or directory (os error 2)"
    );
}

#[test]
fn a_run_dir_too_long_for_sockets_is_refused() {
    let dir = format!("/{}", "d".repeat(96));
    assert_eq!(
        complaint(&format!("[dpu]\nrun_dir = \"{dir}\"\n")),
        format!(
            "dpu.toml:2: `run_dir` makes the socket path {dir}/dpuctl.sock longer than 107 bytes; choose a shorter folder"
        )
    );
}

/// What is said about an RDMA function that is right but for `lines`, which start at line 8.
fn rdma_complaint(lines: &str) -> String {
    let network = if lines.contains("network =") {
        ""
    } else {
        NETWORK
    };
    let head = HEAD.replace("virtio-net", "rdma");
    complaint(&format!("{head}  {lines}\n{MAC}{network}"))
}

#[test]
fn an_rdma_function_gets_its_defaults_and_is_taken_as_written() {
    let head = HEAD.replace("virtio-net", "rdma");
    let parsed = |lines: &str| {
        let config = Config::parse("dpu.toml", &format!("{head}{MAC}{NETWORK}{lines}")).unwrap();
        config.ems[0].functions[0].clone()
    };
    let f = parsed("");
    assert_eq!(
        f.kind,
        FunctionKind::Rdma(RdmaConfig {
            face: RdmaFace::Mlx5,
            link_type: LinkType::Ethernet,
            mapped_doorbells: true
        })
    );
    assert_eq!((f.mtu, f.link_up, f.capture), (1500, true, None));
    assert_eq!(f.attachment, Attachment::Network("blue".into()));
    let f = parsed(
        "link_type = \"infiniband\"\nmapped_doorbells = false\nlink = \"down\"\nmtu = 9000\n\
         ip = \"10.0.0.1/24\"\nsocket = \"/tmp/r.sock\"\n",
    );
    assert_eq!(
        f.kind,
        FunctionKind::Rdma(RdmaConfig {
            face: RdmaFace::Mlx5,
            link_type: LinkType::Infiniband,
            mapped_doorbells: false
        })
    );
    assert_eq!((f.mtu, f.link_up), (9000, false));
    assert_eq!(f.socket, PathBuf::from("/tmp/r.sock"));
}

#[test]
fn what_an_rdma_function_cannot_have_is_named_with_its_line_and_what_it_can() {
    let keys = "`ip`, `kind`, `link`, `link_type`, `mac`, `mapped_doorbells`, `mtu`, `name`, \
                `network`, `socket`, `vm`";
    for (line, key) in [
        ("queue_pairs = 2", "queue_pairs"),
        ("queue_size = 256", "queue_size"),
        ("speed_mbps = 100", "speed_mbps"),
        ("capture = \"x.pcap\"", "capture"),
        ("port = { null = true }", "port"),
    ] {
        assert_eq!(
            rdma_complaint(line),
            format!(
                "dpu.toml:8: a function of kind \"rdma\" has no key `{key}`; its keys are {keys}"
            )
        );
    }
    let cases = [
        (
            "link_type = \"roce\"",
            "`link_type` is \"roce\"; it must be \"ethernet\" or \"infiniband\"",
        ),
        (
            "mapped_doorbells = \"yes\"",
            "`mapped_doorbells` is a string; it must be true or false",
        ),
        (
            "network = \"red\"",
            "`network` is \"red\"; it must be \"blue\"",
        ),
        (
            "mtu = 65520",
            "`mtu` is 65520; it must be an integer from 68 to 9000",
        ),
    ];
    for (lines, sentence) in cases {
        assert_eq!(rdma_complaint(lines), format!("dpu.toml:8: {sentence}"));
    }
    let head = HEAD.replace("virtio-net", "rdma");
    assert_eq!(
        complaint(&format!("{head}{MAC}")),
        "dpu.toml:5: a function of kind \"rdma\" has no `network`; it must be the name of a \
         `[[network]]`"
    );
    assert_eq!(
        function_complaint("link_type = \"ethernet\"")
            .split(';')
            .next(),
        Some("dpu.toml:8: [[em.function]] has no key `link_type`")
    );
    assert_eq!(
        complaint(&HEAD.replace("virtio-net", "nvme")),
        "dpu.toml:7: `kind` is \"nvme\"; it must be \"virtio-net\" or \"rdma\" or \"erdma\" or \"memory\""
    );
}

const MEMORY: &str =
    "[[em]]\nname = \"em0\"\n  [[em.function]]\n  name = \"gpu0\"\n  kind = \"memory\"\n";

#[test]
fn a_memory_function_has_a_vm_and_a_size_and_nothing_else() {
    let config = Config::parse("dpu.toml", &format!("{MEMORY}  vm = \"vm0\"\n")).unwrap();
    let function = &config.ems[0].functions[0];
    assert_eq!(function.kind.memory().unwrap().bytes, 256 << 20);
    assert_eq!(function.vm.as_deref(), Some("vm0"));
    assert_eq!(function.attachment, Attachment::None);
    assert!(!function.kind.has_frames() && function.kind.rdma().is_none());
    let text = format!("{MEMORY}  vm = \"vm0\"\n  size_mib = 8192\n");
    let config = Config::parse("dpu.toml", &text).unwrap();
    let memory = config.ems[0].functions[0].kind.memory().copied();
    assert_eq!(memory.unwrap().bytes, 8 << 30);
}

#[test]
fn what_makes_no_sense_for_a_memory_function_is_refused() {
    let said = |lines: &str| complaint(&format!("{MEMORY}  {lines}\n"));
    assert!(said("").starts_with(
        "dpu.toml:3: a function of kind \"memory\" has no `vm`; it must be the name of the VM that has it"
    ));
    assert!(said("vm = \"../x\"").starts_with("dpu.toml:6: `vm` is \"../x\"; it must be 1 to 32"));
    let size = "it must be a power of two from 1 to 1048576";
    for wrong in ["0", "3", "2097152"] {
        assert_eq!(
            said(&format!("vm = \"vm0\"\n  size_mib = {wrong}")),
            format!("dpu.toml:7: `size_mib` is {wrong}; {size}")
        );
    }
    assert!(
        said("vm = \"vm0\"\n  network = \"blue\"")
            .contains("a function of kind \"memory\" has no key `network`; its keys are")
    );
}

#[test]
fn every_kind_of_function_may_name_its_vm() {
    let config = Config::parse("dpu.toml", &format!("{HEAD}{MAC}{NETWORK}  vm = \"a\"\n")).unwrap();
    assert_eq!(config.ems[0].functions[0].vm.as_deref(), Some("a"));
}

/// A network function and an RDMA function for the `erdma` driver, each with lines of its own.
fn pair(net: &str, erdma: &str) -> String {
    format!(
        "{HEAD}{MAC}{NETWORK}{net}  [[em.function]]\n  name = \"rdma0\"\n  kind = \"erdma\"\n\
         {NETWORK}{erdma}"
    )
}

#[test]
fn an_erdma_function_has_the_address_of_the_network_function_of_its_guest() {
    let mine = "  vm = \"a\"\n";
    for (net, erdma) in [("", MAC.to_owned()), (mine, format!("{MAC}{mine}"))] {
        let config = Config::parse("dpu.toml", &pair(net, &erdma)).unwrap();
        let f = &config.ems[0].functions[1];
        let rdma = f.kind.rdma().unwrap();
        assert_eq!(rdma.face, RdmaFace::Erdma);
        assert_eq!(f.kind.as_str(), "erdma");
        assert_eq!(
            (rdma.link_type, rdma.mapped_doorbells),
            (LinkType::Ethernet, false)
        );
        assert!(!f.kind.has_frames());
    }
}

#[test]
fn an_erdma_function_without_a_network_function_is_refused_with_the_line_of_its_address() {
    let said = complaint(&pair("", "  mac = \"02:00:00:00:00:02\"\n"));
    assert_eq!(
        said,
        "dpu.toml:14: `mac` of function \"rdma0\" is 02:00:00:00:00:02; a function of kind \"erdma\" has the address \
         of a function of kind \"virtio-net\" of its guest, and the same EM, without `vm` has none with this one"
    );
    let other = format!("{MAC}  vm = \"b\"\n");
    let said = complaint(&pair("  vm = \"a\"\n", &other));
    assert!(said.contains("and VM \"b\" has none"), "{said}");
    assert!(complaint(&pair("  vm = \"a\"\n", MAC)).contains("has none"));
    let twice = format!("{}{MAC}", pair("", MAC).replace("rdma0", "rdma1"));
    let twice = twice.replacen(
        "  [[em.function]]\n  name = \"rdma1\"",
        &format!("  [[em.function]]\n  name = \"rdma0\"\n  kind = \"erdma\"\n{NETWORK}{MAC}  [[em.function]]\n  name = \"rdma1\""),
        1,
    );
    let twice = twice.strip_suffix(MAC).unwrap();
    assert!(complaint(twice).contains("is already that of function \"rdma0\""));
}

#[test]
fn an_erdma_function_is_ethernet_with_doorbells_that_are_not_mapped() {
    let with = |line: &str| complaint(&pair("", &format!("{MAC}  {line}\n")));
    let plain = with("link_type = \"ethernet\"\n  mapped_doorbells = false");
    assert!(plain.starts_with("accepted"), "{plain}");
    assert!(with("link_type = \"infiniband\"").contains("it must be \"ethernet\""));
    assert!(with("mapped_doorbells = true").contains("are not mapped"));
    assert!(with("capture = \"a.pcap\"").contains("has no key `capture`"));
}

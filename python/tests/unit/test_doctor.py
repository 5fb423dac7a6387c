"""``python -m tensorcall doctor``, and what the command line says of itself."""

from __future__ import annotations

import resource

import pytest
from tensorcall import __main__, _doctor, _startup


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in ("ADDR", "BACKEND", "IFACE", "SECRET", "SECRET_FILE", "INSTALL"):
        monkeypatch.delenv(f"TENSORCALL_{name}", raising=False)
    for name in ("MASTER_ADDR", "TP_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def findings(init_method="env://"):
    found = {}
    for state, what, text in _doctor.examine(init_method):
        found.setdefault(what, []).append((state, text))
    return found


def test_a_healthy_installation_is_said_to_be_one(capsys):
    status = __main__.main(["doctor"])
    printed = capsys.readouterr().out

    assert status == 0, printed
    assert printed.endswith("nothing is wrong\n")
    for word in ("torch", "transports", "memory, unix, tcp", "secret", "ulimit -n", "127.0.0.1: loopback"):
        assert word in printed


def test_it_says_which_rule_chose_the_address(monkeypatch):
    """LOG row 40."""

    def address(init_method="env://"):
        return findings(init_method)["address"][0]

    assert address("tcp://localhost:1")[1].startswith("127.0.0.1: the local address that routes to localhost")
    assert "since the workers meet on no other host" in address("file:///x")[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "routes to 127.0.0.1, where the workers meet" in address()[1]
    monkeypatch.setenv("TENSORCALL_IFACE", "lo")
    assert "the interface that was asked for, lo" in address()[1]
    monkeypatch.setenv("TENSORCALL_ADDR", "127.0.0.2")
    assert address()[1].startswith("127.0.0.2: the address that was asked for, 127.0.0.2")


def test_an_address_that_cannot_be_listened_on_is_wrong(monkeypatch, capsys):
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    assert findings()["address"][0][0] == "WRONG"

    monkeypatch.setenv("TENSORCALL_IFACE", "nothing0")
    assert __main__.main(["doctor"]) == 1
    assert "WRONG  address" in capsys.readouterr().out


def test_it_says_where_the_secret_comes_from_and_never_what_it_is(monkeypatch, tmp_path, capsys):
    assert "store" in findings()["secret"][0][1]

    file = tmp_path / "secret"
    file.write_text("correct horse battery staple")
    file.chmod(0o644)
    monkeypatch.setenv("TENSORCALL_SECRET_FILE", str(file))
    assert [state for state, _ in findings()["secret"]] == ["ok", "note"]
    file.unlink()
    assert findings()["secret"][0][0] == "WRONG"

    monkeypatch.setenv("TENSORCALL_SECRET", "swordfish")
    __main__.main(["doctor"])
    printed = capsys.readouterr().out
    assert "from TENSORCALL_SECRET" in printed
    assert "9 bytes are few" in printed
    assert "swordfish" not in printed


def test_it_says_so_if_messages_are_to_go_through_a_process_group(monkeypatch):
    assert "backend" not in findings()

    monkeypatch.setenv("TENSORCALL_BACKEND", "process_group")
    state, text = findings()["backend"][0]
    assert (state, "gloo" in text) == ("ok", True)
    monkeypatch.setenv("TENSORCALL_BACKEND", "pigeon")
    assert findings()["backend"][0][0] == "WRONG"


def test_few_descriptors_are_worth_a_note():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    try:
        state, text = findings()["limits"][0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert state == "note"
    assert text.startswith("600 open files")


def test_a_missing_start_up_file_is_worth_a_note(monkeypatch, tmp_path):
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr("site.ENABLE_USER_SITE", False)
    assert next(iter(_doctor._startup_file())).state == "note"

    (tmp_path / _startup.FILE).touch()
    assert next(iter(_doctor._startup_file())) == ("ok", "start-up file", str(tmp_path / _startup.FILE))


@pytest.mark.parametrize(("option", "words"), [("--help", "doctor"), ("--version", "tensorcall ")])
def test_the_command_line_explains_itself(option, words, capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main([option])

    assert not ended.value.code
    assert words in capsys.readouterr().out

"""`dsserve doctor`: findings about this machine, and what makes it fail."""

from __future__ import annotations

import socket

import pytest

from dsserve.cli import doctor
from dsserve.cli.doctor import Finding, Verdict, check_extension, check_port
from dsserve.cli.main import main


def test_a_port_in_use_is_a_warning_with_a_remedy():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        finding = check_port(holder.getsockname()[1])
    assert finding.verdict is Verdict.WARNING
    assert "--port" in finding.detail


def test_a_free_port_is_ok(unused_tcp_port):
    assert check_port(unused_tcp_port).verdict is Verdict.OK


def test_a_missing_extension_is_a_failure(monkeypatch):
    def fail(_name):
        raise ImportError("not built")

    monkeypatch.setattr(doctor.importlib, "import_module", fail)
    assert check_extension().verdict is Verdict.FAILED


def test_a_missing_package_is_a_failure(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    verdicts = {each.name: each.verdict for each in doctor.check_packages()}
    assert verdicts["torch"] is Verdict.FAILED
    assert verdicts["llguidance"] is Verdict.NOTE


@pytest.mark.parametrize(
    ("probe", "verdict", "said"),
    [
        ("print('ok')", Verdict.OK, "works"),
        ("print('torch 9 sees no device')", Verdict.WARNING, "torch 9 sees no device"),
        ("raise SystemExit('no driver')", Verdict.WARNING, "no driver"),
    ],
)
def test_a_gpu_is_reported_with_what_torch_says_of_it(monkeypatch, tmp_path, probe, verdict, said):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Some card, 999.1, 9.0, 1 MiB'\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: str(program))
    monkeypatch.setattr(doctor, "_TORCH_PROBE", probe)
    finding = doctor.check_gpu()
    assert finding.verdict is verdict
    assert "Some card" in finding.detail
    assert said in finding.detail


def test_the_exit_code_tells_whether_something_needed_is_missing(monkeypatch, capsys):
    findings = [Finding("one", Verdict.OK, "fine [sic]"), Finding("two", Verdict.WARNING, "hm")]
    monkeypatch.setattr(doctor, "examine", lambda port: findings)
    assert main(["doctor"]) == 0
    findings.append(Finding("three", Verdict.FAILED, "absent"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fine [sic]" in out
    assert "\x1b" not in out


def test_the_whole_report_runs_here(capsys):
    main(["doctor"])
    out = capsys.readouterr().out
    for name in ("python", "extension", "memory", "shared memory", "open files", "port", "gpu"):
        assert name in out

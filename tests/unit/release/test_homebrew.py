"""The formula is Ruby, and names the wheel that pip would take for each package."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.release.homebrew import best, formula

FILES = "https://files.example"
STAND_IN = """
require "json"
class Formula
  def self.etc = Pathname("/opt/etc")
  def self.var = Pathname("/opt/var")
  def self.opt_bin = Pathname("/opt/bin")
  def self.said = (@said ||= Hash.new { |all, name| all[name] = [] })
  def self.resource(name, &block)
    said["resource"] << name
    instance_eval(&block)
  end
  def self.service(&block) = class_eval(&block)
  def self.test(&block) = said["test"] << block.arity
  def self.method_missing(name, *words, **options)
    words << options unless options.empty?
    said[name.to_s] << words.map { |each| each.is_a?(Array) ? each.map(&:to_s) : each.to_s }
  end
  def self.respond_to_missing?(*) = true
end
module Language; module Python; module Virtualenv; end; end; end
require "pathname"
load ARGV[0]
puts JSON.generate(VlmServer.said)
"""


def package(name: str, *wheels: str) -> dict[str, Any]:
    found = [{"url": f"{FILES}/{wheel}", "hashes": {"sha256": wheel}} for wheel in wheels]
    return {"name": name, "wheels": found}


LOCK = [
    package("pure", "pure-1.0-py3-none-any.whl"),
    package(
        "built",
        "built-2.0-py3-none-any.whl",
        "built-2.0-cp313-cp313-macosx_15_0_arm64.whl",
        "built-2.0-cp313-cp313-macosx_11_0_arm64.whl",
        "built-2.0-cp313-cp313-macosx_14_0_arm64.whl",
        "built-2.0-cp313-cp313-manylinux_2_35_x86_64.whl",
    ),
]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    wheel = tmp_path / "vlm_server-1.2.3-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    path = tmp_path / "vlm-server.rb"
    path.write_text(formula(wheel, f"{FILES}/{wheel.name}", "https://home.example/", LOCK))
    return path


def test_the_wheel_is_that_for_the_oldest_macos() -> None:
    assert best(LOCK[0])["url"].endswith("pure-1.0-py3-none-any.whl")
    assert best(LOCK[1])["url"].endswith("macosx_14_0_arm64.whl")
    with pytest.raises(ValueError, match="alone has no wheel"):
        best(package("alone", "alone-1.0-cp313-cp313-manylinux_2_35_x86_64.whl"))


def test_nothing_is_left_to_fill_in(written: Path) -> None:
    text = written.read_text()
    assert not re.search(r"@[A-Z0-9]+@", text)
    assert hashlib.sha256(b"a wheel").hexdigest() in text
    assert 'version "1.2.3"' in text


@pytest.mark.skipif(shutil.which("ruby") is None, reason="there is no Ruby")
def test_ruby_reads_it_and_the_service_is_that_of_the_other_ways(
    written: Path, tmp_path: Path
) -> None:
    stand_in = tmp_path / "formula.rb"
    stand_in.write_text(STAND_IN)
    ran = subprocess.run(["ruby", "-w", stand_in, written], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["resource"] == ["pure", "built"]
    assert len(said["sha256"]) == 3
    (words,) = said["run"][0]
    assert words[:2] == ["/opt/bin/vlm-server", "serve"]
    assert words[-2:] == ["--give-up-status", "0"], "launchd can't tell statuses apart"
    assert said["test"]

"""The formula is Ruby, and names the wheel that pip would take for each package and macOS."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.release.homebrew import RELEASES, best, formula, resource

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
  SYSTEMS = ["sonoma", "sequoia", "tahoe"]
  HERE = SYSTEMS.index(ARGV[1])
  SYSTEMS.each_with_index do |name, at|
    define_singleton_method("on_#{name}") do |others = nil, &block|
      fits = HERE == at || (others == :or_newer && HERE > at) || (others == :or_older && HERE < at)
      block.call if fits
    end
  end
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


def urls_on(name: str) -> list[str]:
    """The URLs of `LOCK`'s wheels for a release of macOS."""
    return [f"{FILES}/{wheel}.whl" for wheel in WHEELS[name]]


def package(name: str, *wheels: str) -> dict[str, Any]:
    found = [{"url": f"{FILES}/{wheel}", "hashes": {"sha256": wheel}} for wheel in wheels]
    return {"name": name, "wheels": found}


OLD, NEW = "newer-3.0-py3-none-macosx_12_0_arm64", "newer-3.0-py3-none-macosx_26_0_arm64"
LOCK = [
    package("pure", "pure-1.0-py3-none-any.whl"),
    package(
        "built",
        "built-2.0-py3-none-any.whl",
        "built-2.0-cp313-cp313-macosx_15_0_arm64.whl",
        "built-2.0-cp313-cp313-macosx_11_0_arm64.whl",
        "built-2.0-cp313-cp313-macosx_14_0_arm64.whl",
        "built-2.0-cp313-cp313-macosx_26_0_arm64.whl",
        "built-2.0-cp313-cp313-manylinux_2_35_x86_64.whl",
    ),
    package("newer", f"{NEW}.whl", f"{OLD}.whl"),
]
WHEELS = {
    "sonoma": ["pure-1.0-py3-none-any", "built-2.0-cp313-cp313-macosx_14_0_arm64", OLD],
    "sequoia": ["pure-1.0-py3-none-any", "built-2.0-cp313-cp313-macosx_15_0_arm64", OLD],
    "tahoe": ["pure-1.0-py3-none-any", "built-2.0-cp313-cp313-macosx_26_0_arm64", NEW],
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    wheel = tmp_path / "vlm_server-1.2.3-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    path = tmp_path / "vlm-server.rb"
    path.write_text(formula(wheel, f"{FILES}/{wheel.name}", "https://home.example/", LOCK))
    return path


@pytest.mark.parametrize(("macos", "name"), RELEASES.items())
def test_formula_wheel_matches_pip_choice_per_macos(macos: tuple[int, int], name: str) -> None:
    assert [best(locked, macos)["url"] for locked in LOCK] == urls_on(name)
    with pytest.raises(ValueError, match="alone has no wheel"):
        best(package("alone", "alone-1.0-cp313-cp313-manylinux_2_35_x86_64.whl"), macos)


def test_formula_resource_has_block_per_differing_release() -> None:
    declared = [re.findall(r"on_(.+) do", resource(locked)) for locked in LOCK]
    assert declared == [
        [],
        ["sonoma :or_older", "sequoia", "tahoe :or_newer"],
        ["sequoia :or_older", "tahoe :or_newer"],
    ]


def test_formula_refuses_package_without_oldest_macos_wheel() -> None:
    with pytest.raises(ValueError, match="late has no wheel for macOS 14"):
        resource(package("late", "late-1.0-py3-none-macosx_15_0_arm64.whl"))


def test_formula_has_no_placeholders_left(written: Path) -> None:
    text = written.read_text()
    assert not re.search(r"@[A-Z0-9]+@", text)
    assert hashlib.sha256(b"a wheel").hexdigest() in text
    assert 'version "1.2.3"' in text


@pytest.mark.skipif(shutil.which("ruby") is None, reason="there is no Ruby")
@pytest.mark.parametrize("name", RELEASES.values())
def test_ruby_loads_formula_with_resources_and_service(
    written: Path, tmp_path: Path, name: str
) -> None:
    stand_in = tmp_path / "formula.rb"
    stand_in.write_text(STAND_IN)
    ran = subprocess.run(["ruby", "-w", stand_in, written, name], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    declared = json.loads(ran.stdout)
    assert declared["resource"] == ["pure", "built", "newer"]
    assert [words[0] for words in declared["url"][1:]] == urls_on(name)
    assert len(declared["sha256"]) == 4
    (words,) = declared["run"][0]
    assert words[:2] == ["/opt/bin/vlm-server", "serve"]
    assert words[-2:] == ["--give-up-status", "0"], "launchd can't tell statuses apart"
    assert declared["test"]

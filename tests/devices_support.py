"""A machine with cards of our choice: an nvidia-smi on the PATH that answers as the real one does."""

from __future__ import annotations

import json
import sys

import pytest

MIB, GIB = 1 << 20, 1 << 30
A, B, C = "GPU-aaaa1111-0000", "GPU-aaab2222-0000", "GPU-cccc3333-0000"
_SCRIPT = """\
import json, os, pathlib, sys, time
told = json.loads((pathlib.Path(__file__).parent / "told.json").read_text("utf-8"))
if told["stuck"]:
    time.sleep(60)
if "-L" in sys.argv or "-q" in sys.argv:
    print(told["list" if "-L" in sys.argv else "xml"])
    sys.exit(told["list_status"] if "-L" in sys.argv else 0)
asked = next(arg for arg in sys.argv if arg.startswith("--query-gpu="))[12:].split(",")
assert "--format=csv,noheader,nounits" in sys.argv
for field in asked:
    if field in told["unknown_fields"]:
        print(f'Field "{field}" is not a valid field to query.\\n')
        sys.exit(2)
sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
for card in told["cards"]:
    row = ", ".join(str(card[field]) for field in asked)
    print(row if os.environ.get("LC_ALL") == "C" else row.replace("1", "\\u0661"))
for line in told["lines"]:
    print(line)
sys.exit(told["status"])
"""


def card(index, uuid, name="NVIDIA H200", free=100, used=40, total=141, busy=7, **more):
    """A row of nvidia-smi; memory in MiB or in its words."""
    return {
        "index": index, "uuid": uuid, "name": name, "memory.free": free, "memory.used": used,
        "memory.total": total, "utilization.gpu": busy, "mig.mode.current": "Disabled",
        "driver_version": "570.124.06", "pci.bus_id": f"00000000:{index + 1:02}:00.0", **more,
    }  # fmt: skip


def install(
    folder,
    *cards,
    lines=(),
    status=0,
    stuck=False,
    unknown_fields=(),
    slices="",
    xml="",
    list_status=0,
):
    """Put the program into `folder`; returns a PATH that finds it and nothing else."""
    told = {
        "cards": cards, "lines": lines, "status": status, "stuck": stuck,
        "unknown_fields": unknown_fields, "list": slices, "xml": xml,
        "list_status": list_status,
    }  # fmt: skip
    (folder / "told.json").write_text(json.dumps(told), "utf-8")
    program = folder / "nvidia-smi"
    program.write_text(f"#!{sys.executable} -IS\n{_SCRIPT}", "utf-8")
    program.chmod(0o755)
    return str(folder)


@pytest.fixture(name="machine")
def with_cards(tmp_path, monkeypatch):
    """`machine(*cards, mask=…, order=…)`: nothing else is on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(*cards, mask=None, order=None, **told):
        monkeypatch.setenv("PATH", install(folder, *cards, **told))
        for name, value in (("CUDA_VISIBLE_DEVICES", mask), ("CUDA_DEVICE_ORDER", order)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)

    return make


@pytest.fixture(name="bare")
def without_smi(tmp_path, monkeypatch):
    """No nvidia-smi."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def slugs(report):
    return [note["slug"] for note in report["notes"]]


# -- MIG: two cards in halves, one whole ---------------------------------------------------------
def mig(index, uuid, **more):
    words = {"mig.mode.current": "Enabled", "memory.free": 0, "utilization.gpu": "[N/A]"}
    return card(index, uuid, name="NVIDIA A100", **{**words, **more})


LISTED = f"""\
GPU 0: NVIDIA A100 (UUID: {A})
  MIG 1c.3g.20gb  Device  0: (UUID: MIG-11111111-a)
  MIG 1c.3g.20gb  Device  1: (UUID: MIG-22222222-a)
  MIG 1g.5gb      Device  2: (UUID: MIG-33333333-a)
GPU 1: NVIDIA A100 (UUID: {B})
  MIG 3g.20gb     Device  0: (UUID: MIG-44444444-b)
GPU 2: NVIDIA A100 (UUID: {C})"""
_ROW = """<mig_device><index>{}</index><gpu_instance_id>{}</gpu_instance_id>
<compute_instance_id>{}</compute_instance_id><fb_memory_usage><total>{} MiB</total>
<reserved>0 MiB</reserved><used>{} MiB</used><free>{} MiB</free></fb_memory_usage></mig_device>"""
XML = f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><driver_version>570.124.06</driver_version>
<gpu id="00000000:01:00.0"><uuid>{A}</uuid><mig_devices>
{_ROW.format(0, 1, 0, 20096, 19, 20077)}{_ROW.format(1, 1, 1, 20096, 19, 20077)}
{_ROW.format(2, 9, 0, 4864, 12, 4852)}</mig_devices></gpu>
<gpu id="00000000:02:00.0"><uuid>{B}</uuid><mig_devices>{_ROW.format(0, 2, 0, 20096, 96, 20000)}
</mig_devices></gpu><gpu id="00000000:03:00.0"><uuid>{C}</uuid><mig_devices>None</mig_devices></gpu>
</nvidia_smi_log>"""

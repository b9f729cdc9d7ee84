"""The launcher as a person runs it: one line per mistake, exit status 2, and a clean stop."""

import signal
import subprocess
import sys
import urllib.request

import pytest

COMMAND = [sys.executable, "-m", "launch.serve_env"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--catalogue is missing"),
        (["--catalogue", "/no/such/place"], "no manifest.json"),
        (["--port", "99999"], "port"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_it_serves_and_stops(tmp_path, world):
    world.save(tmp_path)
    with subprocess.Popen([*COMMAND, "--catalogue", str(tmp_path), "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("shop: 15 products, 2 tasks on http://127.0.0.1:")
            assert urllib.request.urlopen(line.split()[-1] + "/healthz", timeout=10).status == 200
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0

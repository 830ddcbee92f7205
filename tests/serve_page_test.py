#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The page of `twell serve` in headless Chromium: a chat, its stop button, widths and colours.

Run: serve_page_test.py TWELL. Exits with 77 (skipped) where there is no Chromium. TWELL_SCREENSHOTS
is a folder for screenshots to look at; TWELL_PAGE is the URL of another server to take them of."""

import base64
import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

from serve_testing import MODEL, Served

CHROMIUM = shutil.which("chromium")
if not CHROMIUM:
    print("skipped: there is no chromium")
    sys.exit(77)

BINARY = sys.argv.pop(1)


class Browser:
    """A page in Chromium, driven over its debugging pipe: JSON texts that end with a zero byte."""

    def __init__(self):
        self.profile = tempfile.mkdtemp(prefix="twell-chromium-")
        # The browser reads descriptor 3 and writes descriptor 4.
        to_browser, self.output = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in os.pipe())
        self.input, from_browser = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in os.pipe())

        def place():
            os.dup2(to_browser, 3)
            os.dup2(from_browser, 4)

        self.process = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={self.profile}"],
            preexec_fn=place, pass_fds=(3, 4), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.number, self.session, self.buffer = 0, None, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target,
                                 flatten=True)["sessionId"]
        self.faults = []
        self.call("Runtime.enable")
        self.call("Page.enable")

    def close(self):
        self.process.terminate()
        self.process.wait()
        os.close(self.input)
        os.close(self.output)
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.output, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                data = os.read(self.input, 1 << 20)
                if not data:
                    raise RuntimeError("the browser has ended")
                self.buffer += data
            text, self.buffer = self.buffer.split(b"\0", 1)
            reply = json.loads(text)
            if reply.get("method") == "Runtime.exceptionThrown":
                self.faults.append(reply["params"]["exceptionDetails"])
            if reply.get("id") == self.number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]

    def run(self, script):
        """The value of an expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, condition, seconds=20):
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            if time.monotonic() > deadline:
                raise AssertionError(f"did not become true: {condition}")
            time.sleep(0.05)

    def show(self, width, height, colours):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": colours}])

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", format="png")["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(data))


SEND = "document.getElementById('send')"


class PageTest(unittest.TestCase):
    def setUp(self):
        self.served = None if "TWELL_PAGE" in os.environ else Served(BINARY)
        self.browser = Browser()
        self.browser.show(1600, 900, "light")
        self.browser.call("Page.navigate",
                          url=os.environ.get("TWELL_PAGE") or self.served.url + "/")
        self.browser.wait("document.querySelectorAll('#layers .track').length > 0")

    def tearDown(self):
        self.browser.close()
        if self.served:
            self.assertEqual(self.served.stop(), 0)

    def ask(self, text):
        self.browser.run(f"document.getElementById('ask').value = {json.dumps(text)}; {SEND}.click()")

    def test_chat(self):
        browser = self.browser
        self.assertTrue(browser.run("document.title.length > 0"))
        browser.run("document.getElementById('max-tokens').value = 60")
        self.ask("What floats?")
        browser.wait(f"document.querySelectorAll('.message').length == 2 && "
                     f"{SEND}.textContent == 'Send'")
        self.assertTrue(browser.run("document.querySelector('.theirs').textContent.length > 0"))
        self.assertRegex(browser.run("document.getElementById('figures').textContent"),
                         r"^[\d.]+ tokens/s · \d+ new tokens, \d+ in the prompt")
        self.assertFalse(browser.run("document.querySelector('.fault') != null"))
        # The model has run, so neurons have fired.
        browser.wait("parseFloat(document.querySelector('#layers i').style.width) > 0")
        for width in (360, 700, 1600):
            for colours in ("light", "dark"):
                browser.show(width, 740 if width == 360 else 900, colours)
                self.assertLessEqual(browser.run("document.documentElement.scrollWidth"), width)
                self.assertLessEqual(browser.run("document.documentElement.scrollHeight"), 900)
                self.assertTrue(browser.run(
                    f"{SEND}.getBoundingClientRect().right <= innerWidth && "
                    f"{SEND}.getBoundingClientRect().bottom <= innerHeight"))
                if folder := os.environ.get("TWELL_SCREENSHOTS"):
                    time.sleep(0.5)  # transitions end
                    browser.screenshot(pathlib.Path(folder) / f"{width}-{colours}.png")
        browser.show(1600, 900, "light")
        if not self.served:
            return
        # A prompt that does not fit is refused with the server's reason.
        browser.run("document.getElementById('clear').click()")
        self.ask("long " * 200)
        browser.wait("document.querySelector('.fault') != null")
        self.assertIn("too long", browser.run("document.querySelector('.fault').textContent"))
        # It is not part of the next request, and stands in the field again.
        browser.wait(f"{SEND}.textContent == 'Send'")
        self.assertIn("long long", browser.run("document.getElementById('ask').value"))
        self.ask("What floats?")
        browser.wait(f"document.querySelectorAll('.message').length == 2 && "
                     f"{SEND}.textContent == 'Send'")
        self.assertFalse(browser.run("document.querySelector('.fault') != null"))
        # Stop ends the answer, on the server too.
        browser.run("document.getElementById('clear').click()")
        browser.run("document.getElementById('stop-text').value = '@'")
        self.served.process.send_signal(19)  # SIGSTOP: the answer cannot come in between
        self.ask("What sinks?")
        browser.wait(f"{SEND}.textContent == 'Stop'")
        browser.run(f"{SEND}.click()")
        self.served.process.send_signal(18)  # SIGCONT
        browser.wait(f"{SEND}.textContent == 'Send'")
        self.assertEqual(browser.faults, [])

    def shown(self):
        return self.browser.run("[...document.querySelectorAll('.message')].map(m => m.textContent)")

    def wait_for_answer(self):
        self.browser.wait(f"{SEND}.textContent == 'Send' && document.getElementById('again') != null")

    def reload(self):
        self.browser.call("Page.reload")
        self.browser.wait("document.querySelectorAll('#layers .track').length > 0")

    def look(self, name):
        for width in (360, 700, 1600):
            self.browser.show(width, 740 if width == 360 else 900, "light")
            self.assertLessEqual(self.browser.run("document.documentElement.scrollWidth"), width)
            if folder := os.environ.get("TWELL_SCREENSHOTS"):
                time.sleep(0.3)
                self.browser.screenshot(pathlib.Path(folder) / f"{name}-{width}.png")
        self.browser.show(1600, 900, "light")

    def test_a_chat_outlives_a_reload(self):
        if not self.served:
            return
        browser = self.browser
        browser.run("document.getElementById('max-tokens').value = 20")
        browser.run("document.getElementById('system').value = 'Be brief'")
        browser.run("document.getElementById('system').dispatchEvent(new Event('change'))")
        self.assertEqual(browser.run("JSON.stringify(body().messages)"),
                         '[{"role":"system","content":"Be brief"}]')
        self.ask("What floats?")
        self.wait_for_answer()
        before = self.shown()
        self.reload()
        self.assertEqual(self.shown(), before)
        self.assertEqual(browser.run("document.getElementById('system').value"), "Be brief")
        self.assertEqual(browser.run("document.getElementById('max-tokens').value"), "20")
        # Another answer takes the place of the last one.
        browser.run("document.getElementById('again').click()")
        browser.wait(f"{SEND}.textContent == 'Stop' || document.getElementById('again') != null")
        self.wait_for_answer()
        self.assertEqual(len(self.shown()), 2)
        self.assertEqual(self.shown()[0], "What floats?")
        # What another version or a hand has written there does no harm.
        for text in ("{", "[]", '{"messages": [{"role": "x"}], "settings": 3}', "null"):
            browser.run(f"localStorage.setItem('twell-chat', {json.dumps(text)})")
            self.reload()
            self.assertEqual(self.shown(), [])
        self.assertEqual(browser.faults, [])

    def test_code_stands_in_a_box(self):
        if not self.served:
            return
        text = ("Write `x < 1` so:\n\n```python\nif x < 1:\n    print('<b>', \"" + "wide " * 40 + "\")\n```\n"
                "and then:\n```\nopen")
        self.browser.run(f"messages = [{{role: 'user', content: '<i>How?</i>'}}, "
                         f"{{role: 'assistant', content: {json.dumps(text)}}}]; void paint()")
        self.assertEqual(self.shown()[0], "<i>How?</i>")
        self.assertEqual(self.browser.run("document.querySelectorAll('.theirs pre').length"), 2)
        self.assertEqual(self.browser.run("document.querySelector('.theirs pre').textContent"),
                         "if x < 1:\n    print('<b>', \"" + "wide " * 40 + "\")")
        self.assertEqual(self.browser.run("document.querySelector('.theirs > code').textContent"), "x < 1")
        self.assertEqual(self.browser.run("document.querySelectorAll('.message b, .message i').length"), 0)
        self.look("code")
        self.browser.run("document.getElementById('copy').click()")
        self.browser.wait("document.getElementById('copy').textContent == 'Copied'")

    def test_a_base_model_continues_a_text(self):
        if not self.served:
            return
        base = Served(BINARY, template=None)
        browser = self.browser
        browser.call("Page.navigate", url=base.url + "/")
        browser.wait("document.querySelectorAll('#layers .track').length > 0 && !chat")
        self.assertTrue(browser.run("document.getElementById('system-field').hidden"))
        browser.run("document.getElementById('max-tokens').value = 12")
        self.ask("The cork")
        self.wait_for_answer()
        first = self.shown()
        self.assertEqual(len(first), 1)
        self.assertTrue(first[0].startswith("The cork"))
        browser.run(f"{SEND}.click()")  # goes on where it ended
        browser.wait("messages.length == 3")
        self.wait_for_answer()
        self.assertEqual(len(self.shown()), 1)
        self.assertTrue(self.shown()[0].startswith(first[0]))
        self.look("base")
        self.assertEqual(browser.faults, [])
        self.assertEqual(base.stop(), 0)


class InspectionTest(unittest.TestCase):
    """The page that `twell inspect --html` writes."""

    def test_nothing_is_cut_off(self):
        folder = pathlib.Path(tempfile.mkdtemp(prefix="twell-inspect-"))
        (folder / "text.txt").write_text("What floats and what sinks is told by its weight.\n" * 60)
        subprocess.run([BINARY, "inspect", "--checkpoint", str(MODEL), "--data", str(folder / "text.txt"),
                        "--html", str(folder / "page.html"), "--device", "cpu"], check=True,
                       stdout=subprocess.DEVNULL)
        browser = Browser()
        for width in (320, 400, 700, 1200):
            browser.show(width, 900, "light")
            browser.call("Page.navigate", url=(folder / "page.html").as_uri())
            browser.wait("document.readyState == 'complete' && document.querySelectorAll('svg').length > 3")
            wide = browser.run("""
                [...document.querySelectorAll('body *:not(svg *)')]
                    .filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 ||
                                 e.getBoundingClientRect().right > document.documentElement.clientWidth)
                    .map(e => e.outerHTML.slice(0, 80)).join('; ')""")
            self.assertEqual(wide, "", f"at {width} pixels")
            # Labels can be read, stay inside their chart, and do not run into each other.
            labels = browser.run("""
                [...document.querySelectorAll('svg')].flatMap(svg => {
                    const frame = svg.getBoundingClientRect();
                    const boxes = [...svg.querySelectorAll('text')].map(t => t.getBoundingClientRect())
                        .filter(b => b.width > 0);
                    return boxes.filter((b, i) => b.height < 7 || b.left < frame.left || b.right > frame.right ||
                        boxes.some((c, k) => k > i && c.left < b.right && b.left < c.right &&
                                             c.top < b.bottom - 2 && b.top < c.bottom - 2))
                        .map(b => `${svg.getAttribute('aria-label')} ${b.left} ${b.right} ${b.height}`);
                }).join('; ')""")
            self.assertEqual(labels, "", f"at {width} pixels")
            if shots := os.environ.get("TWELL_SCREENSHOTS"):
                browser.screenshot(pathlib.Path(shots) / f"inspect-{width}.png")
        browser.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    unittest.main(verbosity=1)

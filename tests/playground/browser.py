"""Drives a headless Chromium over the DevTools protocol, with the standard library alone."""

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request


class Browser:
    """One page. Whatever it logs as an error, and whatever it asks of any host, is kept."""

    def __init__(self, width=1400, height=1000):
        names = ["chromium", "chromium-browser", "google-chrome"]
        binary = next(filter(None, map(shutil.which, names)), None)
        if binary is None:
            raise SystemExit("no Chromium is installed: apt-get install chromium")
        self.folder = tempfile.mkdtemp(prefix="playground-")
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update",
                 "--remote-debugging-port=0", f"--user-data-dir={self.folder}",
                 f"--window-size={width},{height}", "about:blank"]
        self.process = subprocess.Popen([binary, *flags], stderr=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL)
        port = self._port()
        listing = f"http://127.0.0.1:{port}/json/list"
        for _ in range(300):
            pages = [t for t in json.load(urllib.request.urlopen(listing)) if t["type"] == "page"]
            if pages:
                break
            time.sleep(0.1)
        self.socket = self._connect(pages[0]["webSocketDebuggerUrl"])
        self.next_id, self.errors, self.requests = 1, [], []
        for domain in ["Page", "Runtime", "Network", "Log"]:
            self.call(domain + ".enable")

    def _port(self):
        path = os.path.join(self.folder, "DevToolsActivePort")
        for _ in range(600):
            if os.path.exists(path) and open(path).read().strip():
                return int(open(path).read().split()[0])
            time.sleep(0.1)
        raise SystemExit("Chromium does not start")

    def _connect(self, url):
        host, path = url.removeprefix("ws://").split("/", 1)
        name, port = host.split(":")
        wire = socket.create_connection((name, int(port)), timeout=120)
        key = base64.b64encode(os.urandom(16)).decode()
        wire.sendall((f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\n"
                      f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
                      "Sec-WebSocket-Version: 13\r\n\r\n").encode())
        self.stream = wire.makefile("rb")
        while self.stream.readline().strip():
            pass
        return wire

    def _send(self, text):
        data, mask = text.encode(), os.urandom(4)
        n = len(data)
        if n < 126:
            head = struct.pack(">BB", 0x81, 0x80 | n)
        elif n < 65536:
            head = struct.pack(">BBH", 0x81, 0x80 | 126, n)
        else:
            head = struct.pack(">BBQ", 0x81, 0x80 | 127, n)
        body = bytes(b ^ mask[i % 4] for i, b in enumerate(data))
        self.socket.sendall(head + mask + body)

    def _receive(self):
        message = b""
        while True:
            first, second = self.stream.read(2)
            n = second & 127
            if n == 126:
                n = struct.unpack(">H", self.stream.read(2))[0]
            elif n == 127:
                n = struct.unpack(">Q", self.stream.read(8))[0]
            message += self.stream.read(n)
            if first & 0x80:
                return json.loads(message)

    def call(self, method, **params):
        """One command and its result; what happens meanwhile is noted."""
        wanted, self.next_id = self.next_id, self.next_id + 1
        self._send(json.dumps({"id": wanted, "method": method, "params": params}))
        while True:
            message = self._receive()
            if message.get("id") == wanted:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def _note(self, message):
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("exception", {}).get("description"))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def run(self, script):
        """The value of an expression in the page, which may be a promise."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True,
                           awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, script, seconds=60):
        """Waits until an expression is true."""
        end = time.time() + seconds
        while not self.run(script):
            if time.time() > end:
                raise AssertionError(f"never true: {script}")
            time.sleep(0.05)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.body && document.body.dataset.ready === '1'")

    def resize(self, width, height, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)
        mode = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": mode}])
        time.sleep(0.3)

    def mouse(self, kind, x, y):
        buttons = 0 if kind == "mouseReleased" else 1
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left",
                  buttons=buttons, clickCount=1)

    def hover(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key):
        for kind in ["keyDown", "keyUp"]:
            self.call("Input.dispatchKeyEvent", type=kind, key=key,
                      text=key if len(key) == 1 and kind == "keyDown" else "")

    def picture(self, path):
        data = self.call("Page.captureScreenshot", format="png")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def close(self):
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

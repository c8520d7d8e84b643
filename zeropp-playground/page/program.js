// The schedule crate as WebAssembly: ask(request) gives its answer, both plain objects.
const program = (() => {
  let module = null, askText = null, script = null, worker = null;
  // Answers that took long, with the time of each, by the text of the request: those of a worker, and
  // of the page a few.
  const ready = new Map();
  const SLOW_MS = 100, READY_MAX = 24;

  // Text to text. Also what a worker runs, which sees nothing of this page.
  function speaker(wasm) {
    return (request) => {
      const bytes = new TextEncoder().encode(request);
      const at = wasm.room(bytes.length);
      new Uint8Array(wasm.memory.buffer, at, bytes.length).set(bytes);
      const answer = wasm.ask(at, bytes.length);
      const length = new DataView(wasm.memory.buffer).getUint32(answer, true);
      const text = new TextDecoder().decode(new Uint8Array(wasm.memory.buffer, answer + 4, length));
      wasm.done(answer);
      return text;
    };
  }
  function stopped(fault) {
    return { error: "The program stopped on this request: " + fault.message };
  }
  // A request that fails leaves its program in pieces: every one has its own.
  async function work({ data: [module, requests] }) {
    for (const request of requests) {
      const began = performance.now();
      let answer;
      try {
        answer = speaker((await WebAssembly.instantiate(module, {})).exports)(request);
      } catch (fault) {
        answer = JSON.stringify(stopped(fault));
      }
      postMessage([request, answer, performance.now() - began]);
    }
  }

  async function start() {
    if (!module) {
      const text = atob(document.getElementById("program").textContent.trim());
      const packed = new Blob([Uint8Array.from(text, (c) => c.charCodeAt(0))]);
      const unpacked = packed.stream().pipeThrough(new DecompressionStream("gzip"));
      module = await WebAssembly.compile(await new Response(unpacked).arrayBuffer());
    }
    askText = speaker((await WebAssembly.instantiate(module, {})).exports);
  }
  // The answer, and in `told.ms` the time it took. A fault inside is told, and the program started anew.
  function ask(request, told = {}) {
    const text = JSON.stringify(request), began = performance.now(), known = ready.get(text);
    try {
      const answer = known ? known[0] : askText(text);
      told.ms = known ? known[1] : performance.now() - began;
      if (!known && told.ms > SLOW_MS && ready.size < READY_MAX) ready.set(text, [answer, told.ms]);
      return JSON.parse(answer);
    } catch (fault) {
      start();
      return stopped(fault);
    }
  }
  // Computes answers beside the page, which ask() then has at once, until others are computed; done once
  // all are there, or at once where there are no workers. What was being computed is given up.
  function ahead(requests, besides = false) {
    giveUp();
    if (!besides) ready.clear();
    const missing = new Set(requests.map((request) => JSON.stringify(request)));
    return new Promise((done) => {
      const end = () => { giveUp(); done(); };
      try {
        script ??= URL.createObjectURL(new Blob([`${speaker};${stopped};onmessage = ${work}`], { type: "text/javascript" }));
        worker = new Worker(script);
      } catch {
        return end();
      }
      worker.onerror = (e) => { e.preventDefault(); end(); };
      worker.onmessage = ({ data: [request, answer, ms] }) => {
        ready.set(request, [answer, ms]);
        missing.delete(request);
        if (!missing.size) end();
      };
      worker.postMessage([module, [...missing]]);
    });
  }
  function giveUp() {
    if (worker) worker.terminate();
    worker = null;
  }
  return { start, ask, ahead, giveUp, askText: (request) => askText(request) };
})();

// The schedule crate as WebAssembly: ask(request) gives its answer, both plain objects.
const program = (() => {
  let wasm = null;
  async function start() {
    const text = atob(document.getElementById("program").textContent.trim());
    const packed = new Blob([Uint8Array.from(text, (c) => c.charCodeAt(0))]);
    const unpacked = packed.stream().pipeThrough(new DecompressionStream("gzip"));
    const bytes = await new Response(unpacked).arrayBuffer();
    wasm = (await WebAssembly.instantiate(bytes, {})).instance.exports;
  }
  function askText(request) {
    const bytes = new TextEncoder().encode(request);
    const at = wasm.room(bytes.length);
    new Uint8Array(wasm.memory.buffer, at, bytes.length).set(bytes);
    const answer = wasm.ask(at, bytes.length);
    const length = new DataView(wasm.memory.buffer).getUint32(answer, true);
    const text = new TextDecoder().decode(new Uint8Array(wasm.memory.buffer, answer + 4, length));
    wasm.done(answer);
    return text;
  }
  // A fault inside would leave the program in pieces: it is started anew, and the fault told.
  function safely(request) {
    try {
      return JSON.parse(askText(JSON.stringify(request)));
    } catch (fault) {
      start();
      return { error: "The program stopped on this request: " + fault.message };
    }
  }
  return { start, ask: safely, askText };
})();

@COMMENT@
// import { load } from "./@STEM@.mjs";
// const stream = await load("@STEM@.wasm");  // a URL, or the file's bytes
// const y = stream.step(x);                // @CALL@

export const inputs = @INPUTS@;
export const outputs = @OUTPUTS@;
export const names = @NAMES@; // of the outputs; may be empty
const takesToken = @TOKEN@;

// Returns a new stream.
export async function load(source) {
  if (typeof source === "string" || source instanceof URL) {
    const response = await fetch(source);
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}: ${source}`);
    source = await response.arrayBuffer();
  }
  return Stream.of(await WebAssembly.compile(source));
}

class Stream {
  static async of(module) {
    const stream = new Stream();
    stream.module = module;
    stream.engine = (await WebAssembly.instantiate(module)).exports;
    stream.engine._initialize();
    const memory = stream.engine.memory.buffer;
    stream.x = takesToken ? null : new @ARRAY@(memory, stream.engine.inputs(), inputs);
    stream.y = new @ARRAY@(memory, stream.engine.outputs(), outputs);
    stream.reset();
    return stream;
  }

  // Reads one time step and returns the outputs.
  step(x) {
    if (takesToken) {
      if (!Number.isInteger(x) || x < 0 || x >= inputs) {
        throw new RangeError(`x must be a token id below ${inputs}. Received: ${x}`);
      }
      this.engine.step(x);
    } else {
      if (x.length !== inputs) {
        throw new RangeError(`x must have ${inputs} numbers. Received: ${x.length}`);
      }
      this.x.set(x);
      this.engine.step();
    }
    return this.y.slice();
  }

  // Resets the stream.
  reset() {
    this.engine.reset();
  }

  // Returns another stream in the same state.
  async clone() {
    const other = await Stream.of(this.module);
    new Uint8Array(other.engine.memory.buffer).set(new Uint8Array(this.engine.memory.buffer));
    return other;
  }
}

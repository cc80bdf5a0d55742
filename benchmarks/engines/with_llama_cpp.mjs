// Greedy continuations of prompts by llama.cpp, with the bytes of the cache of one sequence, and the time.
//
//     npm install node-llama-cpp@3.22.1
//     node with_llama_cpp.mjs model.gguf prompts.json llama-cpp.json [new tokens] [context]
//
// The bytes are those that llama.cpp logs for the keys and values, in float32, of a context of one sequence. Its caches
// of windows have room for a batch beside the window.

import {readFileSync, writeFileSync} from "node:fs";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

// From the folder where npm installed it, wherever this file lies.
const entry = createRequire(process.cwd() + "/").resolve("node-llama-cpp");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(entry).href);

const [model, promptsFile, output, newTokens = "64", contextSize = "4096"] = process.argv.slice(2);
const lines = [];
const llama = await getLlama({
    gpu: false, build: "never", logLevel: LlamaLogLevel.debug, maxThreads: 1, logger: (level, line) => lines.push(line),
});
const loaded = await llama.loadModel({modelPath: model});
const context = await loaded.createContext({
    contextSize: Number(contextSize), sequences: 1, threads: 1, swaFullCache: false, flashAttention: false,
    batchSize: 512, experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32",
});
// "size = 12.34 MiB ( 4096 cells, ..." of each of the two caches: of full layers, and of layers with a window.
const sizes = lines.join("\n").matchAll(/llama_kv_cache: size = +([\d.]+) MiB/g);
const bytes = [...sizes].reduce((sum, found) => sum + Number(found[1]) * 2 ** 20, 0);

const about = {engine: "llama.cpp by node-llama-cpp", bytes_per_sequence: Math.round(bytes), tokens: []};
const reading = [], writing = [];
for (const prompt of JSON.parse(readFileSync(promptsFile, "utf8"))) {
    const tokens = [], began = performance.now();
    let first = 0;
    const sequence = context.getSequence();
    for await (const token of sequence.evaluate(prompt, {temperature: 0})) {
        if (!tokens.length) first = performance.now();
        tokens.push(token);
        if (tokens.length === Number(newTokens)) break;
    }
    about.tokens.push(tokens);
    reading.push((first - began) / 1000);
    writing.push((performance.now() - first) / 1000 / (tokens.length - 1));
    sequence.dispose();
}
const median = (x) => x.sort((a, b) => a - b)[Math.floor(x.length / 2)];
about.seconds_of_a_prompt = median(reading);
about.seconds_of_a_token = median(writing);
writeFileSync(output, JSON.stringify(about));
process.exit(0);

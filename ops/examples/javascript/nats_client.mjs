// Chat with pagemesh over NATS, streaming.
//
//     npm install
//     node nats_client.mjs [--nats URL] [--model NAME] [--max-tokens N] "your question"
//
// The URL may stand in PAGEMESH_NATS too, where it shows in no list of processes:
// PAGEMESH_NATS=$(cat FILE) with the file that `pagemesh up` names as its NATS door.
// With API keys configured, set PAGEMESH_API_KEY.

import { parseArgs } from "node:util";

import { connect, createInbox, headers } from "@nats-io/transport-node";

const CHAT = "pagemesh.v1.chat.completions";
const MODELS = "pagemesh.v1.models";
const SILENCE_MS_MAX = 60_000;
const HINT = "name the server that `pagemesh up` says with PAGEMESH_NATS or --nats";
const USAGE = 'usage: node nats_client.mjs [--nats URL] [--model NAME] [--max-tokens N] "your question"';

process.stdout.on("error", () => process.exit(1)); // whoever read the answer has gone
const { values, question } = commandLine();

function commandLine() {
  const options = {
    nats: { type: "string", default: process.env.PAGEMESH_NATS ?? "nats://127.0.0.1:4222" },
    model: { type: "string", default: "" },
    "max-tokens": { type: "string", default: "128" },
  };
  try {
    const { values, positionals } = parseArgs({ options, allowPositionals: true });
    if (positionals.length === 1 && /^\d+$/.test(values["max-tokens"])) {
      return { values, question: positionals[0] };
    }
  } catch {
    // There is no such option.
  }
  console.error(USAGE);
  process.exit(2);
}

function authorization() {
  const made = headers();
  if (process.env.PAGEMESH_API_KEY) {
    made.set("authorization", `Bearer ${process.env.PAGEMESH_API_KEY}`);
  }
  return made;
}

async function firstModel(connection) {
  const reply = await connection.request(MODELS, "", { timeout: 5_000, headers: authorization() });
  const body = reply.json();
  if (body.error) throw new Error(body.error.message);
  return body.data[0].id;
}

async function chat(connection, model) {
  const inbox = createInbox();
  const replies = connection.subscribe(inbox);
  const body = {
    model,
    messages: [{ role: "user", content: question }],
    max_tokens: Number(values["max-tokens"]),
    stream: true,
    stream_options: { include_usage: true },
  };
  connection.publish(CHAT, JSON.stringify(body), { reply: inbox, headers: authorization() });
  // The library's own limit on silence ends with the first message.
  const silence = setTimeout(() => replies.unsubscribe(), SILENCE_MS_MAX);
  try {
    for await (const message of replies) {
      silence.refresh();
      if (message.headers?.code === 503) throw new Error("no gateway listens");
      if (message.headers?.get("pagemesh-error")) throw new Error(message.json().error.message);
      if (message.data.length > 0) show(message.json());
      if (message.headers?.get("pagemesh-last") === "true") return;
    }
  } finally {
    clearTimeout(silence);
  }
  throw new Error("the answer has no end: who made it has gone, or is silent; ask again");
}

function show(chunk) {
  for (const choice of chunk.choices) process.stdout.write(choice.delta.content ?? "");
  if (chunk.usage) {
    const cached = chunk.usage.prompt_tokens_details.cached_tokens;
    console.log(`\n[${chunk.usage.total_tokens} tokens, ${cached} cached]`);
  }
}

// The library takes user and password beside the URL, not in it.
function server(text) {
  const url = new URL(text.includes("://") ? text : `nats://${text}`);
  const user = decodeURIComponent(url.username);
  const pass = decodeURIComponent(url.password);
  return { servers: url.host, ...(user && { user, pass }), ...(url.protocol === "tls:" && { tls: {} }) };
}

let connection;
try {
  connection = await connect(server(values.nats));
  await chat(connection, values.model || (await firstModel(connection)));
} catch (error) {
  const host = values.nats.replace(/^(\w+:\/\/)?(.*@)?/, ""); // without the password
  console.error(connection ? error.message : `cannot reach NATS at ${host}: ${error.message}; ${HINT}`);
  process.exitCode = 1;
} finally {
  await connection?.close();
}

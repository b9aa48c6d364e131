"""Chat with pagemesh over NATS, streaming. Needs only ``nats-py``.

    python nats_client.py [--nats URL] [--model NAME] [--max-tokens N] "your question"

The URL can also be given in PAGEMESH_NATS, which keeps it out of process lists:
PAGEMESH_NATS=$(cat FILE), with the file that ``pagemesh up`` names as its NATS door.
With API keys configured, set PAGEMESH_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

import nats

CHAT = "pagemesh.v1.chat.completions"
MODELS = "pagemesh.v1.models"
SILENCE_S_MAX = 60
CONNECT_S_MAX = 5
HINT = "name the server that `pagemesh up` says with PAGEMESH_NATS or --nats"


async def main() -> int:
    parser = argparse.ArgumentParser(description="Chat with pagemesh over NATS.")
    parser.add_argument("--nats", default=os.environ.get("PAGEMESH_NATS", "nats://127.0.0.1:4222"))
    parser.add_argument("--model", default="", help="the first one that is served, if not given")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("question")
    arguments = parser.parse_args()

    key = os.environ.get("PAGEMESH_API_KEY", "")
    headers = {"authorization": f"Bearer {key}"} if key else None
    noted: list[Exception] = []

    async def note(error: Exception) -> None:
        noted.append(error)

    try:
        async with asyncio.timeout(CONNECT_S_MAX):  # the library itself retries forever
            client = await nats.connect(arguments.nats, error_cb=note)
    except (OSError, ValueError, nats.errors.Error) as error:
        reason = str(error) or (str(noted[0]) if noted else f"no connection in {CONNECT_S_MAX} s")
        server = arguments.nats.rpartition("//")[2].rpartition("@")[2]  # without the password
        print(f"cannot reach NATS at {server}: {reason}; {HINT}", file=sys.stderr)
        return 1
    try:
        model = arguments.model
        if not model:
            reply = await client.request(MODELS, b"", timeout=5, headers=headers)
            if "pagemesh-error" in (reply.headers or {}):
                print(json.loads(reply.data)["error"]["message"], file=sys.stderr)
                return 1
            model = json.loads(reply.data)["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": arguments.question}],
            "max_tokens": arguments.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return await stream(client, body, headers)
    except nats.errors.NoRespondersError:
        print("no gateway listens", file=sys.stderr)
        return 1
    except nats.errors.Error as error:
        print(f"no answer: {error}", file=sys.stderr)
        return 1
    finally:
        await client.close()


async def stream(client: nats.NATS, body: dict[str, object], headers: dict[str, str] | None) -> int:
    """Print the answer as it arrives; returns the exit code, 0 on success."""
    inbox = client.new_inbox()
    replies = await client.subscribe(inbox)
    await client.publish(CHAT, json.dumps(body).encode(), reply=inbox, headers=headers)
    while True:
        message = await replies.next_msg(timeout=SILENCE_S_MAX)
        facts = message.headers or {}
        if facts.get("Status") == "503":
            print("no gateway listens", file=sys.stderr)
            return 1
        if "pagemesh-error" in facts:
            print(json.loads(message.data)["error"]["message"], file=sys.stderr)
            return 1
        if message.data:
            chunk = json.loads(message.data)
            for choice in chunk["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
            if chunk.get("usage"):
                cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
                print(f"\n[{chunk['usage']['total_tokens']} tokens, {cached} cached]")
        if facts.get("pagemesh-last") == "true":
            return 0


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C, or the reader of the output is gone
        os._exit(130)

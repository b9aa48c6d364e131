"""Chat with pagemesh over HTTP, streaming, with the ``openai`` package.

    python openai_client.py [--url URL] [--model NAME] [--max-tokens N] "your question"

With API keys configured, set PAGEMESH_API_KEY.
"""

from __future__ import annotations

import argparse
import os
import sys

from openai import APIConnectionError, APIError, OpenAI


def main() -> int:
    parser = argparse.ArgumentParser(description="Chat with pagemesh over HTTP.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="", help="the first one that is served, if not given")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("question")
    arguments = parser.parse_args()

    key = os.environ.get("PAGEMESH_API_KEY", "") or "no key is asked for"
    url = arguments.url.rstrip("/").removesuffix("/v1")  # SDKs want the URL with /v1
    with OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        try:
            model = arguments.model or client.models.list().data[0].id
            stream = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": arguments.question}],
                max_tokens=arguments.max_tokens,
                stream=True,
                stream_options={"include_usage": True},
            )
            for chunk in stream:
                for choice in chunk.choices:
                    print(choice.delta.content or "", end="", flush=True)
                if chunk.usage and chunk.usage.prompt_tokens_details:
                    cached = chunk.usage.prompt_tokens_details.cached_tokens
                    print(f"\n[{chunk.usage.total_tokens} tokens, {cached} cached]")
        except APIConnectionError:
            print(
                f"no answer from {arguments.url}; start a mesh with `pagemesh up`, or name it "
                "with --url",
                file=sys.stderr,
            )
            return 1
        except APIError as error:
            print(error.message, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C, or the reader of the output is gone
        os._exit(130)

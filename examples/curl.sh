#!/usr/bin/env bash
# The endpoints by curl, against a running server: examples/curl.sh [http://127.0.0.1:30000]
set -euo pipefail
url="${1:-http://127.0.0.1:30000}"
json='Content-Type: application/json'

show() { printf '\n== %s\n' "$1"; shift; curl -sS --fail-with-body "$@"; printf '\n'; }

show "models" "$url/v1/models"
show "chat" "$url/v1/chat/completions" -H "$json" \
  -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}'
show "chat, streamed, without thinking" -N "$url/v1/chat/completions" -H "$json" \
  -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "stream": true,
       "stream_options": {"include_usage": true}, "thinking": {"type": "disabled"}}'
show "completion of token ids, greedy" "$url/v1/completions" -H "$json" \
  -d '{"prompt": [10, 11, 12], "max_tokens": 8, "temperature": 0, "return_token_ids": true}'
show "ids of a conversation" "$url/tokenize" -H "$json" \
  -d '{"messages": [{"role": "user", "content": "Hello"}]}'
show "text of ids" "$url/detokenize" -H "$json" -d '{"tokens": [10, 11, 12]}'
show "ready" "$url/ready"
show "health" "$url/health"
show "load" "$url/v1/loads"
show "empty the prefix cache" -X POST "$url/flush_cache"
printf '\n== metrics\n'
curl -sS --fail-with-body "$url/metrics" | grep -c '^dsserve_'

"""The chapters of the API reference that no schema can tell. Paragraphs, lists, indented code, tables with bars."""

from __future__ import annotations

CHAPTERS = (
    (
        "start",
        "A first decision",
        """
A request names a resident model, a state (text, a JSON object or a JSON list), and questions by id. Every question is
answered on its own: adding, renaming or reordering questions does not change another answer.

    curl http://127.0.0.1:7777/v1/decisions \\
      -H "Authorization: Bearer $SAKURADITE_API_KEY" \\
      -H 'Content-Type: application/json' \\
      -d '{
        "model": "Qwen/Qwen3-0.6B",
        "state": "I was charged twice for my March invoice.",
        "questions": {
          "refund": {"type": "noul", "instructions": "The customer asks for money back."}
        }
      }'

Bodies may be compressed: `Content-Encoding: zstd` or `gzip`. They are limited to 32 MiB after decompression (by
default) and to 100 levels of nesting. Every response carries `x-request-id`; a valid id of your own is kept.
""",
    ),
    (
        "answers",
        "The three answer types",
        """
| Type | Question | Answer | Confidence |
| `noul` | Is a statement true? | `noul`: the probability that it is | none |
| `choice` | Which of the named options fits? | `choice`: the most probable option; `probabilities` by option | \
(max p - 1/n) / (1 - 1/n) |
| `score` | Where on an ordered list of levels? | `score`: the expected position, counted from 0; `probabilities` and \
`legend` by position | 1 - mean distance to the most probable level / the same for a uniform spread |

Probabilities are normalised over the candidates supplied. They are not calibrated guarantees of correctness: the same
threshold can mean different things on different models. `x_label_mass` is the probability that the model gave to all
candidates together before that; a low one says that the model would rather have said something else.

Batch shapes, precision and fused kernels can change floating-point results, so probabilities are not promised bit for
bit.
""",
    ),
    (
        "images",
        "Images",
        """
Up to eight JPEG or PNG images, at most 20 MiB and 50 megapixels each, as base64 data URLs in `images`; the System One
route takes them as `assets`, the OpenAI dialect as `input_image` parts. EXIF orientation is applied. Remote URLs are
never fetched. A model without vision answers 422. See the [image example](#createDecision).
""",
    ),
    (
        "streaming",
        "Streaming",
        """
With `"stream": true` the native dialect answers with `text/event-stream`. Answers are streamed, not tokens: each event
has a name and one JSON payload whose `type` is that name.

| Event | Payload | When |
| `answer` | [AnswerEvent](#schema-AnswerEvent) | a question is answered; in the order in which they are ready |
| `complete` | [CompleteEvent](#schema-CompleteEvent) | the last event of a success: the whole result |
| `error` | [ErrorEvent](#schema-ErrorEvent) | the last event of a failure |

A failure before the first answer keeps its ordinary status and JSON body. A stream that ends without `complete` or
`error` was cut off: discard it. A reader that takes nothing for 30 seconds (by default) is cut off; closing the
connection cancels the questions that have not been computed.
""",
    ),
    (
        "operations",
        "Loading a model, and polling an operation",
        """
Deciding never downloads or loads. `pull` and `load` answer 202 at once with an [Operation](#schema-Operation); poll it
until its `status` is `succeeded`, `failed` or `cancelled`. A poll answers 200 whatever became of the operation; its
`error` has the code and message.

    curl http://127.0.0.1:7777/admin/v1/models/load \\
      -H "Authorization: Bearer $SAKURADITE_ADMIN_KEY" \\
      -H 'Content-Type: application/json' \\
      -d '{"model": "Qwen/Qwen3-0.6B"}'

    curl http://127.0.0.1:7777/admin/v1/operations/OPERATION_ID \\
      -H "Authorization: Bearer $SAKURADITE_ADMIN_KEY"
""",
    ),
    (
        "keys",
        "Keys",
        """
There are two, and neither opens what the other does. Both are sent as `Authorization: Bearer KEY`.

- The inference key (`SAKURADITE_API_KEY`) opens decisions, the list of models and this reference. \
Without one, only callers on the same machine are served.
- The admin key (`SAKURADITE_ADMIN_KEY`, or the file `admin.key` in the daemon's home) opens `/admin/v1`.

Never put a key in a URL: URLs end up in logs and histories. To save this reference from a server with a key:

    curl -H "Authorization: Bearer $SAKURADITE_API_KEY" -o docs.html http://127.0.0.1:7777/docs
    curl -H "Authorization: Bearer $SAKURADITE_API_KEY" -o openapi.json http://127.0.0.1:7777/openapi.json

No cross-origin access is enabled, so web pages of other origins cannot call this server.
""",
    ),
)

ERRORS = """
Errors are JSON. A 422 lists every wrong field under `detail`, each with its location; `param` is the path of the first.
Nothing of the request's content is repeated. 429 and 503 carry `Retry-After` where waiting helps.

    {
      "error": {
        "code": "validation_error",
        "message": "questions.team.criteria: Should have at least 1 item, has 0",
        "type": "invalid_request_error",
        "param": "questions.team.criteria"
      },
      "detail": [
        {
          "loc": ["body", "questions", "team", "criteria"],
          "msg": "Should have at least 1 item, has 0",
          "type": "too_short"
        }
      ]
    }

The System One route has its own shape: `{"detail": [...]}` for a 422, else `{"detail": {"error_type", "message"}}`, and
an unknown model is 400 there.
"""

"""An MCP server over standard input and output, with one function: it needs no package."""

import json
import sys

QUESTION = {"type": "object", "properties": {"question": {"type": "string"}}}
TOOL = {"name": "ask", "description": "Asks the oracle.", "inputSchema": QUESTION}


def result(request):
    """The result of a request."""
    method, params = request["method"], request.get("params", {})
    if method == "initialize":
        server = {"name": "oracle", "version": "1"}
        version = params["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        question = params["arguments"]["question"]
        return {"content": [{"type": "text", "text": f"To {question!r} the oracle says: 4711."}]}
    return {}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        reply = {"jsonrpc": "2.0", "id": request["id"], "result": result(request)}
        print(json.dumps(reply), flush=True)

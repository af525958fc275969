"""An engine process without a model: the first argument chooses how it starts, a prompt's first token what it does.

0, n    n tokens, then the end
1       nothing until an abort
2       the process dies
3       a refusal
4       nothing until an abort, which it answers twice
"""

import os
import sys
import threading

from server.engine_launch import EngineLaunch
from server.messages import (
    Abort,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Ready,
    Shutdown,
    StartFailed,
    Submit,
    Tokens,
)
from server.transport import EngineChannel


def exit_with_parent():
    while os.read(0, 4096):
        pass
    os._exit(5)


def finished(request_id, reason, num_output_tokens=0):
    return Finished(request_id, reason, 1, 0, num_output_tokens)


def answer(message):
    request_id, prompt = message.request_id, message.prompt_token_ids
    match prompt[0]:
        case 0:
            tokens = [Tokens(request_id, [i]) for i in range(prompt[1])]
            return [*tokens, finished(request_id, FinishReason.LENGTH, prompt[1])]
        case 2:
            os._exit(3)
        case 3:
            return [Failed(request_id, FailureKind.NO_FIT, "too long")]
    return [Tokens(request_id, [7])]


def serve(channel):
    doubles = set()
    stays = sys.argv[1] == "stays"
    while True:
        for message in channel.receive(10.0):
            match message:
                case Submit():
                    if message.prompt_token_ids[0] == 4:
                        doubles.add(message.request_id)
                    channel.send(answer(message))
                case Abort():
                    end = finished(message.request_id, FinishReason.ABORT)
                    channel.send([end, end] if message.request_id in doubles else [end])
                case Shutdown():
                    if not stays:
                        return


def main():
    launch = EngineLaunch.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=exit_with_parent, daemon=True).start()
    channel = EngineChannel(launch.address)
    match sys.argv[1]:
        case "crashes":
            os._exit(9)
        case "fails":
            channel.send([StartFailed("config.json: no such file")])
            channel.close()
            sys.exit(1)
        case "hangs":
            threading.Event().wait()
    channel.send([Ready(num_pages=10, page_size=16, max_model_len=160, vocab_size=100)])
    serve(channel)
    channel.close()


main()

"""A child process that answers wrongly: ``BEHAVIOUR`` in the environment says how."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import time

from offload_backend_nixl.protocol import (
    MAX_PACKET_BYTES,
    Answer,
    Entry,
    Operation,
    Outcome,
    Request,
    Result,
    decode_request,
    encode_answer,
)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    memory = mmap.mmap(int(sys.argv[2]), 0)
    behaviour = os.environ["BEHAVIOUR"]
    if behaviour == "no start":
        time.sleep(1000)
    while packet := connection.recv(MAX_PACKET_BYTES + 1):
        request = decode_request(packet)
        if request.operation is Operation.CONFIGURE:
            connection.send(encode_answer(Answer(Outcome.DONE, request.number)))
        else:
            misbehave(behaviour, connection, memory, request)


def moved(request: Request, outcome: Outcome) -> Answer:
    """Return the answer to a load or a store of which all transfers ended alike."""
    return Answer(Outcome.MOVED, request.number, results=(Result(outcome),) * len(request.items))


def misbehave(behaviour: str, connection: socket.socket, memory: mmap.mmap, request: Request) -> None:
    number = request.number
    if behaviour == "nonsense":
        connection.send(b"\xff" * 40)
    elif behaviour == "too long":
        connection.send(bytes(MAX_PACKET_BYTES + 1000))
    elif behaviour == "cut":
        connection.send(encode_answer(Answer(Outcome.SIZES, number, sizes=(1, 2)))[:-3])
    elif behaviour == "other request":
        connection.send(encode_answer(Answer(Outcome.DONE, number + 1000)))
    elif behaviour == "endless":
        while True:
            connection.send(encode_answer(moved(request, Outcome.MISS)))
    elif behaviour == "too few results":
        connection.send(encode_answer(Answer(Outcome.MOVED, number)))
    elif behaviour == "digest":
        results = (Result(Outcome.DONE, bytes(16)),) * len(request.items)
        connection.send(encode_answer(Answer(Outcome.MOVED, number, results=results)))
    elif behaviour == "miss of a store":
        connection.send(encode_answer(moved(request, Outcome.MISS)))
    elif behaviour == "too many results":
        connection.send(encode_answer(Answer(Outcome.MOVED, number, results=(Result(Outcome.DONE),) * 9)))
    elif behaviour == "other question":
        answer = Answer(Outcome.ENTRIES, number, entries=(Entry("x", 1, 0.0),), more=True)
        connection.send(encode_answer(answer))
    elif behaviour == "too few sizes":
        connection.send(encode_answer(Answer(Outcome.SIZES, number, sizes=())))
    elif behaviour == "end":
        sys.exit(7)
    elif behaviour == "ending":
        connection.send(encode_answer(Answer(Outcome.ENDING, number, text="a file is bad")))
        connection.send(encode_answer(moved(request, Outcome.CORRUPT)))
        os.kill(os.getpid(), signal.SIGSTOP)
    elif behaviour == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif behaviour == "silence":
        time.sleep(1000)
    elif behaviour == "other bytes":
        for item in request.items:
            memory[item.offset : item.offset + item.nbytes] = b"\x55" * item.nbytes
        connection.send(encode_answer(moved(request, Outcome.DONE)))
    elif behaviour == "no bytes":
        connection.send(encode_answer(moved(request, Outcome.DONE)))
    else:
        raise AssertionError(behaviour)


if __name__ == "__main__":
    main()

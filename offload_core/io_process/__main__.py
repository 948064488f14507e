"""The program of the I/O process. The engine's process starts it; it is not for the command line."""

from offload_core.runtime.companion_child import prepare_child

if __name__ == "__main__":
    message = prepare_child()  # before the imports that start threads

    from offload_core.io_process.serving.server import serve

    serve(message)

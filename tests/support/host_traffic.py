"""Programs for the hosts of a network under test: ``python host_traffic.py WHAT ARGUMENTS`` prints its result as JSON.

They import nothing but the standard library, so they start quickly and run anywhere.
"""

import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import time

PORT = 5000


def run(network, host, what, *arguments):
    """What the program printed, once it has ended."""
    return end(begin(network, host, what, *arguments))


def end(process):
    """What a program printed, once it has ended by itself."""
    output, _ = process.communicate(timeout=60)
    return json.loads(output)


def begin(network, host, what, *arguments):
    """The program, started; a server has said that it listens."""
    argv = [sys.executable, __file__, what, *map(str, arguments)]
    process = network.popen(host, argv, stdout=subprocess.PIPE, text=True)
    if what in SERVERS:
        assert process.stdout.readline() == "ready\n"
    return process


def count(address, quiet_s):
    """Numbers of the packets that arrive, in order, until none has for a while."""
    server = _udp(address)
    _say_ready()
    numbers = [_number(server.recv(2048))]
    server.settimeout(float(quiet_s))
    try:
        while True:
            numbers.append(_number(server.recv(2048)))
    except TimeoutError:
        return numbers


def blast(address, num_packets, pause_s):
    """Send numbered packets, evenly spread."""
    client = _udp()
    next_s = time.perf_counter()
    for number in range(int(num_packets)):
        client.sendto(struct.pack("I", number).ljust(100), (address, PORT))
        next_s += float(pause_s)
        time.sleep(max(0.0, next_s - time.perf_counter()))
    return int(num_packets)


def receive(address):
    """Take what one connection sends to its end; its SHA-256."""
    digest = hashlib.sha256()
    with socket.create_server((address, PORT)) as server:
        _say_ready()
        connection, _ = server.accept()
    with connection:
        while data := connection.recv(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def send(address, nbytes):
    """Send so many random bytes over one connection; their SHA-256."""
    data = os.urandom(int(nbytes))
    with socket.create_connection((address, PORT)) as connection:
        connection.sendall(data)
    return hashlib.sha256(data).hexdigest()


def hold(address):
    """Connect, say so, and wait for the connection's end: what it was."""
    with socket.create_connection((address, PORT)) as connection:
        _say_ready()
        return _end_of(connection)


def hold_open(address):
    """Accept one connection and wait for its end: what it was."""
    with socket.create_server((address, PORT)) as server:
        _say_ready()
        connection, _ = server.accept()
    with connection:
        return _end_of(connection)


def _end_of(connection):
    try:
        return "data" if connection.recv(1) else "closed"
    except OSError as error:
        return type(error).__name__


def _number(packet):
    return struct.unpack_from("I", packet)[0]


def _udp(address=None):
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    if address is not None:
        udp.bind((address, PORT))
    return udp


def _say_ready():
    print("ready", flush=True)


SERVERS = ("count", "receive", "hold", "hold_open")

if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])), flush=True)

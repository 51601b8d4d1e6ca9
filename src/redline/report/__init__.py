"""The report: run folders as one self-contained page, as tables in a terminal, and live. No torch.

    shown = RunView(read_run(Path("runs/nano")))      # view.py; its summary (figures.py) holds plain numbers
    write_page([shown], Path("report.html"))          # page.py
    print_report([shown], Output())                   # terminal.py
    make_server(Path("runs/nano"), port=8765)         # serve.py: the page of a run under way

It only reads: training never calls it, and it changes nothing in a run folder.
"""

"""The report: what run folders say, as one self-contained page, as tables in a terminal, and live. No torch.

    run = read_run(Path("runs/nano"))                 # runs.py
    shown = view(run)                                 # view.py; its summary (figures.py) holds every number
                                                      as a plain value
    write_page([shown], Path("report.html"))          # page.py
    print_report([shown], Console())                  # terminal.py
    make_server(Path("runs/nano"), port=8765)         # serve.py: the page of a run that is under way

It only reads: nothing in here is called by training, and nothing in a run folder is changed.
"""

// Under LANG=C Chromium reports the language en-US@posix, which makes uPlot throw.
try { new Intl.NumberFormat(navigator.language) } catch (e) { Object.defineProperty(navigator, "language", { value: "en" }) }
